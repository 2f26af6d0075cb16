// Everything that comes from the server or a person is shown by textContent or by an attribute's property.
const $ = (id) => document.getElementById(id);
const GENERATIONS = "v1/images/generations", EDITS = "v1/images/edits", VIDEOS = "v1/videos";
const PARTIAL_IMAGES = 3; // as many as the server makes
const STREAMS = 3; // at once: a browser has six connections to a server, for all its tabs
const AGAIN_MS = 2000, POLL_MS = 1000; // between questions to ranks that load, and about a video
const MOST_WAIT_S = 30; // between two tries while the server's queue is full
const MOST_PICTURES = 200, MOST_BYTES = 512e6; // of the history, for all keys
const FORGOTTEN_MS = 86400e3; // after which the queue of a closed tab is dropped
const MOST_INPUTS = 16; // of a request, by the server's rule
const AUTO = "auto", OTHER = "other";
// fields of requests that are controls of the same name
const NUMBERS = ["n", "seconds", "fps", "steps", "guidance", "true_guidance", "strength", "control_scale"];
const CHOICES = ["negative_prompt", "preset", "scheduler", "controlnet"];
const KEPT = [...NUMBERS, ...CHOICES, "prompt", "class", "size", "width", "height", "seed"]; // of the form, over a reload
const SAME = ["fps", "seed", "steps", "preset", "scheduler", "guidance", "true_guidance", "strength", "control_scale"]; // as flags
const CONTROLS = { input_reference: "image", frames: "seconds", mask: "paint" }; // where the error of another field is shown

let models = [];
let ranks = null; // how many there are, and on what
let owner = null; // the name of the key, whose history this is
let database = null;
let jobs = []; // of this tab, in order: { record, state, row, stop, ... }
let entries = []; // results, newest first: { record, url, item }
let shown = null; // the entry in the frame
let pinned = false; // whether a person has chosen it, so that the next result does not replace it
let inputs = []; // images of the form: { name, blob, mask, strokes }
let control = null; // the image that a ControlNet follows: { name, blob }

class Refused extends Error {
  constructor(answer, said) {
    super(said?.message ?? `the server answers with status ${answer.status}`); // a proxy may say nothing
    Object.assign(this, { status: answer.status, param: said?.param ?? null });
    this.retry_s = Number(answer.headers.get("retry-after")) || AGAIN_MS / 1000;
  }
}

class Failed extends Error {
  constructor({ message, param }) {
    super(message);
    this.param = param ?? null;
  }
}

// --- asking the server

async function ask(path, settings = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...settings.headers, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...settings, headers });
  if (!answer.ok) throw new Refused(answer, (await answer.json().catch(() => null))?.error);
  return answer;
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = []; // of a line, which is long where it holds an image
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    const [first, ...others] = next.value.split("\n");
    parts.push(first);
    for (const other of others) {
      const line = parts.join("");
      parts = [other];
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

// --- what stays in the browser: texts of the form in localStorage, results and the queue in IndexedDB

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("seqpar", 1);
    request.onupgradeneeded = () => {
      for (const name of ["pictures", "jobs"]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function store(name, method, ...values) {
  try {
    database ??= await openDatabase();
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(name, "readwrite");
      const request = transaction.objectStore(name)[method](...values);
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error ?? request.error);
    });
  } catch (error) {
    say("kept", `This browser does not keep results over a reload: ${error.message}`); // a private window, a full disk
    return [];
  }
}

async function keep(record) {
  await store("pictures", "put", record);
  let bytes = 0;
  for (const [index, other] of (await store("pictures", "getAll")).reverse().entries()) {
    bytes += [other, ...other.files].reduce((sum, { blob }) => sum + blob.size, 0);
    if (index >= MOST_PICTURES || bytes > MOST_BYTES) await store("pictures", "delete", other.id);
  }
  for (const entry of entries.slice(MOST_PICTURES)) forget(entry);
}

async function recall() {
  for (const entry of [...entries]) forget(entry);
  for (const record of await store("pictures", "getAll")) if (record.owner === owner) add(record);
  show(entries[0] ?? null);
  for (const record of await store("jobs", "getAll")) {
    if (jobs.some((job) => job.record.id === record.id)) continue; // another key was asked for while it ran
    if (record.tab === tab() && record.owner === owner) (record.inputs ? refill : enqueue)(record);
    else if (Date.now() - record.at > FORGOTTEN_MS) store("jobs", "delete", record.id);
  }
}

// the images of the form, which lie beside the queue of the tab, and the size, which follows them
function keepImages() {
  save();
  const kept = inputs.map(({ name, blob, mask }) => ({ name, blob, mask }));
  const followed = control && { name: control.name, blob: control.blob };
  store("jobs", "put", { id: `form-${tab()}`, tab: tab(), owner, at: Date.now(), inputs: kept, control: followed });
}

function refill(record) {
  if (inputs.length > 0 || control !== null) return; // a person was faster
  [inputs, control] = [record.inputs.slice(0, imagesOf(model().seqpar)), record.control];
  arrange();
}

function newId() {
  // in order of time; crypto.randomUUID needs HTTPS
  return `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
}

function tab() {
  if (sessionStorage.getItem("tab") === null) sessionStorage.setItem("tab", newId());
  return sessionStorage.getItem("tab");
}

// --- what can be asked for

async function begin() {
  try {
    const listed = await (await ask("v1/models")).json();
    ranks = await (await ask("ready")).json();
    [models, owner] = [listed.data, listed.seqpar.key];
  } catch (error) {
    begunWithout(error);
    return;
  }
  $("unlock").hidden = true;
  const place = `${ranks.ranks} ${ranks.ranks === 1 ? "rank" : "ranks"} on ${onGpus() ? ranks.device : "the CPU"}`;
  say("server", owner === null ? place : `${place} · key of ${owner}`);
  $("model").replaceChildren(...models.map(({ id }) => option(id)));
  $("form").hidden = $("stage").hidden = false;
  write(JSON.parse(localStorage.getItem("form")) ?? {});
  $(hasClasses() ? "class" : "prompt").focus();
  await recall();
}

// which models are in memory now: a server with --swap loads one when it is asked for
async function lookForLoaded() {
  if (models.every(({ seqpar }) => seqpar.loaded)) return;
  const listed = await ask("v1/models").then((answer) => answer.json(), () => null);
  if (listed === null) return;
  for (const { id, seqpar } of models) seqpar.loaded = listed.data.find((other) => other.id === id)?.seqpar.loaded ?? false;
  markLoaded();
}

function markLoaded() {
  for (const [index, { id, seqpar }] of models.entries()) $("model").options[index].textContent = seqpar.loaded ? id : `${id} (not loaded)`;
  say("unloaded", model().seqpar.loaded ? "" : "The first request loads this model, which takes longer.");
}

function begunWithout(error) {
  if (error.status === 401) {
    const wrong = sessionStorage.getItem("key") !== null;
    sessionStorage.removeItem("key");
    say("refused", wrong ? "This server does not know that key." : "");
    say("server", "");
    $("form").hidden = $("stage").hidden = true;
    $("unlock").hidden = false;
    $("key").focus();
  } else {
    $("unlock").hidden = true;
    say("server", error.status === 503 ? "The ranks load their models." : `No answer: ${error.message}`);
    setTimeout(begin, AGAIN_MS);
  }
}

const onGpus = () => ranks.device !== "cpu";
const model = () => models[$("model").selectedIndex];
const aboutOf = (body) => models.find(({ id }) => id === body.model)?.seqpar;
const hasPart = ({ takes }, part) => Object.keys(takes).some((start) => start.split("+").includes(part));
const imagesOf = (about) => (about.takes.image?.several ? MOST_INPUTS : hasPart(about, "image") ? 1 : 0);
const hasClasses = () => model().seqpar.classes.length > 0;
const fieldOf = (id) => ($(id).matches("fieldset") ? $(id) : $(id).closest("div, label"));
const isShown = (id) => $(id).closest("[hidden]") === null;

function option(value, text = value) {
  const made = document.createElement("option");
  Object.assign(made, { value, textContent: text });
  return made;
}

function fill(id, options) {
  const before = $(id).value;
  $(id).replaceChildren(...options);
  if (options.some(({ value }) => value === before)) $(id).value = before;
}

function choose() {
  const about = model().seqpar;
  const makes = `Makes ${about.makes === "videos" ? "videos" : "images"}`, cache = about.cache ? ` · step cache ${about.cache}` : "";
  say("about-model", `${makes} · precision ${about.precision ?? "of the weights"}${cache}`);
  markLoaded();
  say("prompt-label", about.kind === "classes" ? "Number of a class" : "Prompt");
  const use = about.makes === "videos" ? "Image to begin with" : imagesOf(about) > 1 ? "Images to change" : "Image to change";
  say("image-label", about.needs_picture ? use : `${use} (optional)`);
  $("files").multiple = imagesOf(about) > 1;
  fill("class", about.classes.map((name) => option(name)));
  fill("scheduler", [option("", "The model's own"), ...Object.keys(about.schedulers).map((name) => option(name))]);
  fill("controlnet", [option("", "None"), ...about.controlnets.map((name) => option(name))]);
  fill("preset", [option("", "None"), ...Object.keys(about.presets).map((name) => option(name))]);
  const own = about.size === AUTO || about.needs_picture ? [] : about.sizes.length > 0 ? about.sizes : [about.size];
  const automatic = imagesOf(about) > 0 || own.length === 0 ? [option(AUTO, "Automatic")] : [];
  fill("size", [...own.map((size) => option(size)), ...automatic, option(OTHER, "Other")]);
  for (const id of ["width", "height"]) $(id).min = $(id).step = about.size_unit;
  $("steps").placeholder = about.steps;
  if (about.makes === "videos") $("seconds").placeholder = (about.frames / about.fps).toFixed(2).replace(/\.?0+$/, "");
  $("fps").placeholder = about.fps ?? "";
  $("lora-rows").replaceChildren(...about.loras.map(loraRow));
  inputs.length = Math.min(inputs.length, imagesOf(about));
  arrange();
}

function arrange() {
  const about = model().seqpar, films = about.makes === "videos", preset = $("preset").value !== "";
  const { rules, masks, controlled } = chosen(about), takes = (id) => !(id in rules.refused);
  const visible = {
    prompt: !hasClasses(),
    class: hasClasses(),
    negative_prompt: takes("negative_prompt"),
    image: imagesOf(about) > 0,
    mask: masks,
    control: about.controlnets.length > 0,
    control_image: controlled,
    control_scale: controlled,
    strength: imagesOf(about) > 0 && takes("strength"),
    sides: $("size").value === OTHER,
    n: !films,
    growing: !films,
    seconds: films,
    fps: films && takes("fps"),
    steps: !preset,
    guidance: takes("guidance"),
    true_guidance: takes("true_guidance"),
    preset: Object.keys(about.presets).length > 0,
    scheduler: !preset && Object.keys(about.schedulers).length > 0,
    lora: about.loras.length > 0,
  };
  for (const [id, yes] of Object.entries(visible)) (id === "sides" ? $(id) : fieldOf(id)).hidden = !yes;
  $("unmask").hidden = !inputs[0]?.mask;
  $("paint").textContent = inputs[0]?.mask ? "Edit mask" : "Paint a mask";
  say("about-mask", masks && !inputs[0].mask && !("image" in about.takes) ? "This model needs a mask: what it repaints." : "");
  for (const control of $("form").elements) control.disabled = control.closest("[hidden]") !== null; // else it is checked
  [$("steps").min, $("steps").max] = about.schedulers[$("scheduler").value] ?? [1, 1000];
  const beside = rules.beside.negative_prompt?.replace("_", " ");
  $("negative_prompt").placeholder = beside ? `needs ${beside} over 1` : "";
  $("files").required = about.needs_picture && inputs.length === 0;
  $("inputs").replaceChildren(...inputs.map((input) => inputItem(input, () => take(inputs.filter((other) => other !== input)), "files")));
  $("control_image").required = controlled && control === null;
  $("control-inputs").replaceChildren(...(control === null ? [] : [inputItem(control, () => follow(null), "control_image")]));
}

// what the form starts from, in the words of the server's `takes`, and the rules for it
function chosen(about) {
  const masks = hasPart(about, "mask") && inputs.length === 1, controlled = about.controlnets.includes($("controlnet").value);
  const parts = { image: inputs.length > 0, mask: masks && inputs[0].mask, control: controlled };
  const start = Object.keys(parts).filter((part) => parts[part]).join("+") || "text";
  const likest = Object.keys(about.takes).find((other) => other.startsWith(start)) ?? Object.keys(about.takes)[0];
  return { rules: about.takes[start] ?? about.takes[likest], masks, controlled };
}

// the files of a request as it is asked now; those with a role are of the field of its name
function filesAsked() {
  const { masks, controlled } = chosen(model().seqpar), [first] = inputs;
  const images = inputs.map(({ name, blob }, index) => ({ name: inputs.findIndex((other) => other.name === name) < index ? `${index + 1}-${name}` : name, blob }));
  if (masks && first.mask) images.push({ role: "mask", name: `${first.name.replace(/\.\w+$/, "")}-mask.png`, blob: first.mask });
  if (controlled && control !== null) images.push({ role: "control_image", name: `control-${control.name}`, blob: control.blob });
  return images;
}

function follow(image) {
  control = image;
  unmark("control_image");
  arrange();
  keepImages();
}

function inputItem(input, leave, focus) {
  const item = document.createElement("li"), image = document.createElement("img"), button = document.createElement("button");
  Object.assign(image, { alt: input.name, src: (input.url ??= URL.createObjectURL(input.blob)) });
  Object.assign(button, { type: "button", className: "small", textContent: "Remove" });
  button.setAttribute("aria-label", `Remove ${input.name}`);
  button.addEventListener("click", () => {
    leave();
    $(focus).focus();
  });
  item.append(image, ...(input.mask ? [maskOver(input)] : []), button);
  return item;
}

function take(images) {
  const first = $("size").options[0].value, had = inputs.length > 0;
  inputs = images.slice(0, imagesOf(model().seqpar));
  const [from, to] = inputs.length > 0 ? [first, AUTO] : [AUTO, first]; // an edit keeps the shape of its image
  if (had !== inputs.length > 0 && $("size").value === from) $("size").value = to;
  unmark("image");
  unmark("paint");
  arrange();
  keepImages();
}

function loraRow(name) {
  const row = document.createElement("div"), label = document.createElement("label");
  const taken = document.createElement("input"), scale = document.createElement("input");
  taken.type = "checkbox";
  taken.dataset.lora = name;
  Object.assign(scale, { type: "number", min: -100, max: 100, step: "any", value: 1, required: true });
  scale.setAttribute("aria-label", `Weight of ${name}`);
  row.className = "lora";
  label.className = "check";
  label.append(taken, name);
  row.append(label, scale);
  return row;
}

const lorasTaken = () =>
  [...$("lora-rows").children]
    .map((row) => row.querySelectorAll("input"))
    .filter(([taken]) => taken.checked)
    .map(([taken, scale]) => ({ name: taken.dataset.lora, scale: scale.valueAsNumber }));

function asked() {
  const size = $("size").value === OTHER ? `${$("width").value}x${$("height").value}` : $("size").value;
  const given = (ids) => ids.filter((id) => isShown(id) && $(id).value !== "");
  const loras = lorasTaken();
  return {
    model: model().id,
    prompt: hasClasses() ? $("class").value : $("prompt").value,
    ...(size === AUTO ? {} : { size }),
    seed: $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : $("seed").valueAsNumber,
    ...Object.fromEntries(given(NUMBERS).map((id) => [id, $(id).valueAsNumber])),
    ...Object.fromEntries(given(CHOICES).map((id) => [id, $(id).value])),
    ...(loras.length > 0 ? { lora: loras } : {}),
  };
}

function read() {
  const values = Object.fromEntries(KEPT.map((id) => [id, $(id).value]));
  const [growing, terminal] = [$("growing").checked, $("terminal").open];
  return { model: model().id, growing, terminal, loras: lorasTaken(), ...values };
}

function write({ model: name, growing, terminal, loras = [], ...values }) {
  if (models.some(({ id }) => id === name)) $("model").value = name;
  choose();
  for (const [id, value] of Object.entries(values)) {
    if (!$(id).options || [...$(id).options].some((option) => option.value === value)) $(id).value = value;
  }
  $("growing").checked = growing ?? $("growing").checked;
  $("terminal").open = terminal ?? $("terminal").open;
  for (const row of $("lora-rows").children) {
    const [taken, scale] = row.querySelectorAll("input");
    const used = loras.find((lora) => lora.name === taken.dataset.lora);
    taken.checked = used !== undefined;
    scale.value = used?.scale ?? 1;
  }
  arrange();
}

function reuse({ body, files }) {
  const [width, height] = body.size?.split("x") ?? ["", ""];
  const values = Object.fromEntries(KEPT.map((id) => [id, body[id] ?? ""]));
  write({ ...values, model: body.model, class: body.prompt, n: 1, loras: body.lora });
  const of = (role) => files.filter((file) => file.role === role).map(({ name, blob }) => ({ name, blob }));
  [inputs, [control = null]] = [of(undefined), of("control_image")];
  for (const { blob } of of("mask")) inputs[0].mask = blob;
  const listed = [...$("size").options].some(({ value }) => value === body.size);
  $("size").value = body.size === undefined ? AUTO : listed ? body.size : OTHER;
  Object.assign($("width"), { value: width });
  Object.assign($("height"), { value: height });
  arrange();
  keepImages();
  $("generate").focus();
}

const save = () => localStorage.setItem("form", JSON.stringify(read()));

// --- what people do

function on(id, type, act) {
  $(id).addEventListener(type, act);
}

on("unlock", "submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  begin();
});
on("form", "submit", (event) => {
  event.preventDefault();
  generate();
});
on("form", "input", (event) => {
  const field = event.target.closest("fieldset")?.id || event.target.id;
  unmark(["width", "height"].includes(field) ? "size" : field);
  save();
});
const reveal = ({ target }) => ($("more").open ||= $("more").contains(target)); // else the browser cannot show it
$("form").addEventListener("invalid", reveal, true);
on("form", "change", save);
on("terminal", "toggle", save);
on("prompt", "keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
on("model", "focus", lookForLoaded);
on("model", "change", () => {
  choose();
  keepImages();
});
for (const id of ["size", "preset", "scheduler", "controlnet"]) on(id, "change", arrange);
// what files hold now: a browser does not send one that has changed since it was chosen
async function chosenIn(id) {
  const files = [...$(id).files];
  $(id).value = ""; // so that the same file can be chosen again
  return Promise.all(files.map(async (file) => ({ name: file.name, blob: new Blob([await file.arrayBuffer()], { type: file.type }) })));
}
on("files", "change", async () => {
  const added = await chosenIn("files");
  take(imagesOf(model().seqpar) > 1 ? [...inputs, ...added] : added);
});
on("control_image", "change", async () => follow((await chosenIn("control_image"))[0] ?? control));
on("reuse", "click", () => reuse(shown.record));
on("input", "click", () => {
  if (imagesOf(model().seqpar) === 0) {
    const other = models.find(({ seqpar }) => imagesOf(seqpar) > 0);
    $("model").value = other.id;
    choose();
  }
  const image = { name: nameOf(shown.record), blob: shown.record.blob };
  take(imagesOf(model().seqpar) > 1 ? [...inputs, image] : [image]);
  $("prompt").focus();
});
async function discard(discarded) {
  await Promise.all(discarded.map(({ record }) => store("pictures", "delete", record.id)));
  for (const entry of discarded) forget(entry);
  ($("history").querySelector("button") ?? $("generate")).focus();
}
on("remove", "click", () => discard([shown]));
on("clear", "click", () => {
  if (confirm("Remove all results from this browser?")) discard(entries);
});
const enlarge = () => {
  Object.assign($("large"), { src: shown.url, alt: shown.record.body.prompt });
  $("full").showModal();
};
on("enlarge", "click", enlarge);
on("picture", "click", () => $("picture").src === shown?.url && enlarge()); // no preview
on("close", "click", () => $("full").close());
on("zoom", "click", () => $("zoom").setAttribute("aria-pressed", $("sheet").classList.toggle("actual")));
on("film", "error", () => {
  if ($("film").hasAttribute("src")) say("problem", "This browser cannot play the video; save it to play it elsewhere.");
});
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(button));
  button.addEventListener("blur", () => (button.textContent = "Copy"));
}
setInterval(() => jobs.forEach(tell), 1000);
begin();
