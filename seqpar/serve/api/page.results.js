// --- showing results

function say(id, text) {
  $(id).textContent = text;
}

function mark(id, message) {
  const text = document.createElement("p"), control = $(id);
  Object.assign(text, { id: `${id}-wrong`, className: "wrong", textContent: message });
  text.setAttribute("role", "alert");
  text.dataset.of = id;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", text.id);
  fieldOf(id).append(text);
  if ($("more").contains(control)) $("more").open = true;
  text.scrollIntoView({ block: "nearest" });
}

function unmark(id) {
  $(`${id}-wrong`)?.remove();
  $(id).removeAttribute("aria-invalid");
  $(id).removeAttribute("aria-errormessage");
}

const isHeld = () => pinned || !$("film").paused; // what a person has chosen or watches stays
const isVideo = (blob) => blob.type.startsWith("video/");

async function thumbnailOf(blob) {
  const source = isVideo(blob) ? await firstFrame(blob) : await createImageBitmap(blob);
  const width = source.videoWidth ?? source.width, height = source.videoHeight ?? source.height;
  const scale = Math.min(1, 176 / Math.max(width, height)), canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.max(1, width * scale), height: Math.max(1, height * scale) });
  canvas.getContext("2d").drawImage(source, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/webp"));
}

function firstFrame(blob) {
  const film = document.createElement("video");
  Object.assign(film, { muted: true, preload: "auto", src: URL.createObjectURL(blob) });
  return new Promise((resolve, reject) => {
    film.addEventListener("loadeddata", () => resolve(film));
    film.addEventListener("error", () => reject(film.error)); // a codec that this browser does not have
  }).finally(() => URL.revokeObjectURL(film.src));
}

function add(record) {
  const entry = { record, url: URL.createObjectURL(record.blob), item: document.createElement("li") };
  const button = document.createElement("button"), { prompt, seed } = record.body;
  Object.assign(button, { type: "button", title: prompt });
  button.setAttribute("aria-label", `${prompt}, seed ${seed}`);
  button.addEventListener("click", () => {
    pinned = true;
    show(entry);
  });
  if (record.thumbnail === null) {
    button.textContent = isVideo(record.blob) ? "video" : "image";
  } else {
    const image = document.createElement("img");
    Object.assign(image, { alt: "", src: URL.createObjectURL(record.thumbnail) });
    button.append(image);
  }
  entry.item.append(button);
  entries.unshift(entry);
  $("history").prepend(entry.item);
  return entry;
}

function forget(entry) {
  for (const url of [entry.url, entry.item.querySelector("img")?.src]) if (url) URL.revokeObjectURL(url);
  entry.item.remove();
  entries = entries.filter((other) => other !== entry);
  if (shown === entry) show(entries[0] ?? null);
}

function preview(job, blob) {
  const before = job.preview;
  job.preview = URL.createObjectURL(blob);
  frame(job.preview, false, job.record.body.prompt).then(() => before !== null && URL.revokeObjectURL(before));
  $("made").hidden = $("terminal").hidden = true;
  say("status", "A preview of what is being made.");
}

function show(entry) {
  shown = entry;
  say("problem", "");
  for (const job of jobs) {
    if (job.preview !== null) URL.revokeObjectURL(job.preview);
    job.preview = null;
  }
  frame(entry?.url ?? null, entry !== null && isVideo(entry.record.blob), entry?.record.body.prompt ?? "");
  $("made").hidden = $("terminal").hidden = entry === null;
  if (entry !== null) describe(entry);
  $("past").hidden = entries.length === 0;
  for (const other of entries) other.item.firstChild.setAttribute("aria-current", other === entry);
}

let wanted = null; // the address that the frame shows, or will show when it is decoded
async function frame(url, isFilm, text) {
  wanted = url;
  if (url !== null && !isFilm) {
    const next = new Image();
    next.src = url;
    await next.decode().catch(() => null); // until then the last picture stays; a broken one shows its text
    if (wanted !== url) return;
  }
  Object.assign($("picture"), { hidden: url === null || isFilm, alt: text });
  if (url !== null && !isFilm) $("picture").src = url;
  $("film").hidden = !isFilm;
  $("film").setAttribute("aria-label", text);
  if (isFilm) {
    $("film").src = url;
  } else if ($("film").hasAttribute("src")) {
    $("film").removeAttribute("src");
    $("film").load();
  }
  $("empty").hidden = url !== null;
}

function describe({ record, url }) {
  const { body, size, seconds, blob, files, frames } = record, about = aboutOf(body);
  const numbers = ["guidance", "true_guidance", "strength"].filter((name) => name in body);
  const loras = (body.lora ?? []).map((lora) => `${lora.name} x ${lora.scale}`);
  const facts = [
    body.model,
    size,
    frames && `${frames} frames`,
    `seed ${body.seed}`,
    body.steps && `${body.steps} steps`,
    ...numbers.map((name) => `${name.replace("_", " ")} ${body[name]}`),
    body.preset,
    body.scheduler,
    body.controlnet && `ControlNet ${body.controlnet} x ${body.control_scale ?? 1}`,
    files.some(({ role }) => role === "mask") ? "with a mask" : undefined,
    ...loras,
    `${seconds.toFixed(1)} s`,
  ];
  say("caption", body.prompt);
  say("about-picture", facts.filter((fact) => fact !== undefined).join(" · "));
  $("enlarge").hidden = isVideo(blob);
  $("input").hidden = isVideo(blob) || !models.some(({ seqpar }) => imagesOf(seqpar) > 0);
  const name = nameOf(record);
  Object.assign($("save"), { href: url, download: name, textContent: `Save ${name.split(".").pop().toUpperCase()}` });
  $("terminal").hidden = about === undefined; // a model that is served no more
  if (about === undefined) return;
  say("command", command(record, about));
  say("curl", curl(record));
  const hints = [
    ...(about.alias ? [`MODEL stands for the folder or name that the server has ${body.model} from.`] : []),
    ...(about.kind === "classes" ? ["The command writes a sheet with labels."] : []),
    ...(loras.length > 0 ? ["LORAS stands for the folder that the server has its LoRAs from."] : []),
    ...(body.controlnet ? [`CONTROLNET stands for the folder that the server has ${body.controlnet} from.`] : []),
    ...(files.length > 0 ? ["Both lines read their input from the current folder:"] : []),
  ];
  say("hint", hints.join(" "));
  $("input-files").replaceChildren(...files.map(saveLink));
}

function saveLink({ name, blob }) {
  const link = document.createElement("a");
  Object.assign(link, { className: "button small", download: name, textContent: `Save ${name}` });
  link.addEventListener("click", () => (link.href = URL.createObjectURL(blob)));
  link.href = "#";
  return link;
}

const nameOf = ({ body, blob }) => `seqpar-${body.seed}.${blob.type.split("/")[1]}`;

// --- the same from a terminal

function quoted(text) {
  return /^[\w./:,@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function command({ body, files, frames, blob }, about) {
  const [width, height] = body.size?.split("x") ?? []; // the command line has the height first
  const flags = {
    model: about.alias ? undefined : body.model,
    [about.kind === "classes" ? "classes" : "prompt"]: body.prompt,
    negative_prompt: body.negative_prompt,
    size: body.size && `${height}x${width}`,
    frames,
    ...Object.fromEntries(SAME.map((name) => [name, body[name]])),
    precision: about.precision,
    min_psnr: about.min_psnr,
    cache: about.cache,
  };
  const known = about.alias ? [`--model="$MODEL"`] : [];
  const words = Object.entries(flags)
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `--${name.replaceAll("_", "-")}=${quoted(`${value}`)}`);
  const named = (wanted) => files.filter(({ role }) => role === wanted).map(({ name }) => quoted(`./${name}`));
  if (named().length > 0) words.push("--image", ...named());
  for (const file of named("mask")) words.push(`--mask=${file}`);
  for (const file of named("control_image")) words.push(`--controlnet="$CONTROLNET"`, `--control-image=${file}`);
  const loras = (body.lora ?? []).map(({ name, scale }) => {
    const [file, transformer] = name.split("@");
    return `"$LORAS"/${quoted(`${file}.safetensors:${scale}${transformer ? `@${transformer}` : ""}`)}`;
  });
  if (loras.length > 0) words.push("--lora", ...loras);
  if (isVideo(blob)) words.push("--out=seqpar.mp4");
  return ["seqpar sample", ...known, ...words, `--${onGpus() ? "gpus" : "ranks"}=${ranks.ranks}`].join(" ");
}

function curl({ route, body, files }) {
  const key = sessionStorage.getItem("key") === null ? "" : ` -H "authorization: Bearer $SEQPAR_KEY"`;
  const url = quoted(new URL(route, location.href).href), get = `curl -sSf${key}`;
  const field = route === VIDEOS ? "input_reference" : "image[]";
  const parts = files.map(({ role, name }) => `-F ${quoted(`${role ?? field}=@"./${name.replaceAll(/["\\]/g, "\\$&")}"`)}`);
  const texts = textsOf(body).map(([name, value]) => `--form-string ${quoted(`${name}=${value}`)}`);
  const json = `-H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}`;
  const asking = `${get} ${url} ${files.length > 0 ? [...texts, ...parts].join(" ") : json}`;
  if (route !== VIDEOS) return `${asking} | jq -r '.data[0].b64_json' | base64 -d > seqpar.png`;
  const status = `$(${get} ${url}/$id | jq -r .status)`;
  const wait = `while echo "${status}" | grep -E 'queued|in_progress'; do sleep 2; done`;
  return `id=$(${asking} | jq -r .id); ${wait}; ${get} ${url}/$id/content -o seqpar.mp4`;
}

async function copy(button) {
  const text = $(button.dataset.copies);
  try {
    await navigator.clipboard.writeText(text.textContent); // which a page by plain HTTP from elsewhere does not have
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    button.textContent = "Press Ctrl+C";
  }
}

