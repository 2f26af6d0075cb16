// What OpenAI's client for npm does with a server: node tests/support/clients.mjs URL, where NODE_PATH has it.
import { createRequire } from "node:module";
const require = createRequire(import.meta.url);
const { OpenAI, toFile } = require("openai");
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const check = (holds, said) => { if (!holds) throw new Error(JSON.stringify(said)); };
const png = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAKCAIAAAAYbLhkAAAAEklEQVR4nGP4z8CAhtD5g1gIAGuIO8VagDEMAAAAAElFTkSuQmCC", "base64");
const image = { model: "toy", prompt: "a green frog", size: "64x48" };

check((await client.models.retrieve("toy")).id === "toy", "no model");
const made = await client.images.generate({ ...image, n: 2, quality: "high", complexity: "low", seed: -1 });
check(made.data.length === 2 && made.warnings.length === 2, made);
const kinds = [];
for await (const event of await client.images.generate({ ...image, stream: true, partial_images: 1 })) kinds.push(event.type);
check(kinds.at(-1) === "image_generation.completed", kinds);
const file = await toFile(png, "a.png", { type: "image/png" });
const edited = await client.images.edit({ image: file, model: "editor", prompt: "in red", lora: { name: "style", scale: 0.5 } });
check(edited.data[0].b64_json, edited);
if (client.videos) {
  const { id } = await client.videos.create({ model: "movie", prompt: "it jumps", seconds: "4", size: "64x48" });
  while ((await client.videos.retrieve(id)).status !== "completed") await new Promise((done) => setTimeout(done, 50));
  check((await (await client.videos.downloadContent(id)).arrayBuffer()).byteLength, id);
  check((await client.videos.delete(id)).deleted, id);
}
console.log(require("openai/version").VERSION);
