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
const NUMBERS = ["n", "seconds", "fps", "steps", "guidance", "true_guidance", "strength"];
const CHOICES = ["negative_prompt", "preset", "scheduler"];
const KEPT = [...NUMBERS, ...CHOICES, "prompt", "class", "size", "width", "height", "seed"]; // of the form, over a reload
const SAME = ["fps", "seed", "steps", "preset", "scheduler", "guidance", "true_guidance", "strength"]; // as flags
const CONTROLS = { input_reference: "image", frames: "seconds" }; // where the error of another field is shown

let models = [];
let ranks = null; // how many there are, and on what
let owner = null; // the name of the key, whose history this is
let database = null;
let jobs = []; // of this tab, in order: { record, state, row, stop, ... }
let entries = []; // results, newest first: { record, url, item }
let shown = null; // the entry in the frame
let pinned = false; // whether a person has chosen it, so that the next result does not replace it
let inputs = []; // images of the form: { name, blob }

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
    if (record.tab === tab() && record.owner === owner) enqueue(record);
    else if (Date.now() - record.at > FORGOTTEN_MS) store("jobs", "delete", record.id);
  }
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
const imagesOf = ({ takes }) => (!takes.image ? 0 : takes.image.several ? MOST_INPUTS : 1);
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
  say("prompt-label", about.kind === "classes" ? "Number of a class" : "Prompt");
  const use = about.makes === "videos" ? "Image to begin with" : imagesOf(about) > 1 ? "Images to change" : "Image to change";
  say("image-label", about.needs_picture ? use : `${use} (optional)`);
  $("files").multiple = imagesOf(about) > 1;
  fill("class", about.classes.map((name) => option(name)));
  fill("scheduler", [option("", "The model's own"), ...Object.keys(about.schedulers).map((name) => option(name))]);
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
  const rules = about.takes[inputs.length > 0 || about.needs_picture ? "image" : "text"], takes = (id) => !(id in rules.refused);
  const visible = {
    prompt: !hasClasses(),
    class: hasClasses(),
    negative_prompt: takes("negative_prompt"),
    image: imagesOf(about) > 0,
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
  for (const control of $("form").elements) control.disabled = control.closest("[hidden]") !== null; // else it is checked
  [$("steps").min, $("steps").max] = about.schedulers[$("scheduler").value] ?? [1, 1000];
  const beside = rules.beside.negative_prompt?.replace("_", " ");
  $("negative_prompt").placeholder = beside ? `needs ${beside} over 1` : "";
  $("files").required = about.needs_picture && inputs.length === 0;
  $("inputs").replaceChildren(...inputs.map(inputItem));
}

function inputItem(input) {
  const item = document.createElement("li"), image = document.createElement("img"), button = document.createElement("button");
  Object.assign(image, { alt: input.name, src: (input.url ??= URL.createObjectURL(input.blob)) });
  Object.assign(button, { type: "button", className: "small", textContent: "Remove" });
  button.setAttribute("aria-label", `Remove ${input.name}`);
  button.addEventListener("click", () => {
    take(inputs.filter((other) => other !== input));
    $("files").focus();
  });
  item.append(image, button);
  return item;
}

function take(images) {
  const first = $("size").options[0].value, had = inputs.length > 0;
  inputs = images.slice(0, imagesOf(model().seqpar));
  const [from, to] = inputs.length > 0 ? [first, AUTO] : [AUTO, first]; // an edit keeps the shape of its image
  if (had !== inputs.length > 0 && $("size").value === from) $("size").value = to;
  unmark("image");
  arrange();
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
  inputs = files.map(({ name, blob }) => ({ name, blob }));
  const listed = [...$("size").options].some(({ value }) => value === body.size);
  $("size").value = body.size === undefined ? AUTO : listed ? body.size : OTHER;
  Object.assign($("width"), { value: width });
  Object.assign($("height"), { value: height });
  arrange();
  save();
  $("generate").focus();
}

const save = () => localStorage.setItem("form", JSON.stringify(read()));

// --- the queue of this tab

function generate() {
  const body = asked(), films = model().seqpar.makes === "videos";
  const route = films ? VIDEOS : inputs.length > 0 ? EDITS : GENERATIONS;
  const files = inputs.map(({ name, blob }) => ({ name, blob }));
  const previews = !films && $("growing").checked ? PARTIAL_IMAGES : 0;
  const record = { id: newId(), tab: tab(), owner, at: Date.now(), route, body, files, previews, done: 0, video: null };
  for (const marked of document.querySelectorAll("[data-of]")) unmark(marked.dataset.of);
  say("problem", "");
  say("status", "");
  pinned = false;
  store("jobs", "put", record);
  enqueue(record, JSON.stringify(read()));
  $("frame").scrollIntoView({ block: "nearest" });
}

function enqueue(record, draft = null) {
  const progress = { step: 0, steps: 0, position: 0, seconds: 0, left: null, note: "" };
  const job = { record, draft, state: "waiting", stop: new AbortController(), preview: null, ...progress };
  job.row = rowOf(job);
  jobs.push(job);
  $("jobs").append(job.row);
  runNext();
}

function runNext() {
  const streams = jobs.filter(({ state, record }) => state === "running" && record.route !== VIDEOS).length;
  const next = jobs.filter(({ state }) => state === "waiting");
  const [first] = next.filter(({ record }) => record.route !== VIDEOS);
  for (const job of next) if (job.record.route === VIDEOS || (job === first && streams < STREAMS)) run(job);
  for (const job of jobs) tell(job);
  $("queue").hidden = jobs.length === 0;
}

async function run(job) {
  job.state = "running";
  try {
    await (job.record.route === VIDEOS ? makeVideo(job) : makeImages(job));
    leave(job);
  } catch (error) {
    fail(job, error);
  }
  runNext();
}

// ask, and again while the server's queue is full or its ranks start anew
async function askPatiently(job, settings) {
  for (;;) {
    try {
      const answer = await ask(job.record.route, { method: "POST", ...settings });
      job.note = "";
      return answer;
    } catch (error) {
      if (error.status !== 429 && error.status !== 503) throw error;
      const seconds = Math.min(error.retry_s, MOST_WAIT_S);
      const reason = error.status === 429 ? "the server's queue is full" : "the server is not ready";
      job.note = `${reason}, asking again in ${seconds} s`;
      tell(job);
      await pause(seconds, job.stop.signal);
    }
  }
}

function sent(body, files, name) {
  if (files.length === 0) return { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const form = new FormData();
  for (const [field, value] of textsOf(body)) form.append(field, value);
  for (const file of files) form.append(name, file.blob, file.name);
  return { body: form };
}

const textOf = (value) => (typeof value === "object" ? JSON.stringify(value) : `${value}`);
const textsOf = (body) => Object.entries(body).map(([name, value]) => [name, textOf(value)]);

async function makeImages(job) {
  const { record, stop } = job, { body, files, done, previews } = record;
  const rest = { ...body, seed: body.seed + done, n: body.n - done }; // a reload keeps what is made
  const asking = sent({ ...rest, stream: true, stream_steps: true, partial_images: previews }, files, "image[]");
  const answer = await askPatiently(job, { ...asking, signal: stop.signal });
  for await (const event of eventsOf(answer)) await hear(job, event);
  if (record.done < body.n) throw new Error("the connection ended before the images were made");
  say("status", body.n > 1 ? "The images are made." : "The image is made.");
}

async function hear(job, event) {
  const [, kind] = event.type.split(".");
  if (event.type === "error") throw new Failed(event.error);
  if ("estimated_s" in event) job.left = leftOf(event);
  if (kind === "queued") job.position = event.position;
  if (kind === "step") Object.assign(job, { position: 0, step: event.step, steps: event.steps });
  if (kind === "partial_image" && !isHeld()) preview(job, blobOf(event));
  if (kind === "completed") {
    const { n, ...body } = { ...job.record.body, seed: event.seqpar.seed }, { seconds } = event.seqpar; // of all images so far
    await finish(job, { body, blob: blobOf(event), size: event.size, seconds: sum(seconds) - job.seconds });
    job.seconds = sum(seconds);
  }
  tell(job);
}

const sum = (parts) => Object.values(parts).reduce((total, part) => total + part, 0);
const leftOf = ({ estimated_s: seconds }) => (seconds === null ? null : { seconds, at: Date.now() });

function blobOf({ b64_json: text, output_format: kind }) {
  return new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type: `image/${kind}` });
}

async function makeVideo(job) {
  const { record, stop } = job;
  if (record.video === null) {
    const { n, ...body } = record.body;
    const answer = await askPatiently(job, sent(body, record.files, "input_reference"));
    record.video = (await answer.json()).id;
    if (stop.signal.aborted) dropVideo(record);
    await store("jobs", "put", record); // which a reload asks for again
  }
  for (;;) {
    stop.signal.throwIfAborted();
    const about = await videoOf(job);
    if (about?.status === "completed") {
      const file = await ask(`${VIDEOS}/${record.video}/content`, { signal: stop.signal });
      const { frames, seconds } = about.seqpar;
      await finish(job, { body: record.body, blob: await file.blob(), size: about.size, seconds: sum(seconds), frames });
      say("status", "The video is made.");
      return;
    }
    if (about?.status === "failed") throw new Failed(about.error);
    if (about) Object.assign(job, about.seqpar, { left: leftOf(about.seqpar) });
    tell(job);
    await pause(POLL_MS / 1000, stop.signal);
  }
}

// the state of a video; null while the server is away, which may come back with it
async function videoOf(job) {
  try {
    const about = await (await ask(`${VIDEOS}/${job.record.video}`, { signal: job.stop.signal })).json();
    job.note = "";
    return about;
  } catch (error) {
    if (error.status !== 503 && !(error instanceof TypeError)) throw error;
    job.note = "no answer, asking again";
    return null;
  }
}

const dropVideo = ({ video }) => ask(`${VIDEOS}/${video}`, { method: "DELETE" }).catch((error) => say("problem", error.message));

async function finish(job, made) {
  const { record } = job, { owner, route, files } = record;
  const result = { id: newId(), owner, route, files, ...made, thumbnail: await thumbnailOf(made.blob).catch(() => null) };
  record.done += 1;
  Object.assign(job, { step: 0 });
  const entry = add(result);
  if (!isHeld()) show(entry);
  await keep(result);
  await store("jobs", "put", record);
}

function leave(job) {
  const focused = job.row.contains(document.activeElement); // which is lost where a button goes
  jobs = jobs.filter((other) => other !== job);
  job.row.remove();
  store("jobs", "delete", job.record.id);
  if (focused) ($("jobs").querySelector("button") ?? $("generate")).focus();
  if (job.preview !== null) show(shown);
}

function fail(job, error) {
  if (job.preview !== null) show(shown);
  const control = CONTROLS[error.param] ?? error.param?.split(".")[0];
  const field = control === "prompt" && hasClasses() ? "class" : control;
  if (error.name === "AbortError") {
    say("status", "Cancelled.");
    leave(job);
  } else if (error.status === 401) {
    leave(job);
    begunWithout(error);
  } else if (field && job.draft === JSON.stringify(read()) && $("form").contains($(field)) && isShown(field)) {
    mark(field, error.message); // where the form is still as it was sent
    leave(job);
  } else {
    job.state = "failed";
    job.note = error instanceof TypeError ? `No answer: ${error.message}` : error.message;
    store("jobs", "delete", job.record.id);
    say("problem", "A request failed; the queue has the reason.");
  }
}

function cancel(job) {
  const running = job.state === "running";
  job.stop.abort(); // the server cancels images that their client leaves
  if (running && job.record.video !== null) dropVideo(job.record);
  if (!running) {
    leave(job);
    runNext();
  }
}

function rowOf(job) {
  const row = document.createElement("li"), prompt = document.createElement("p"), detail = document.createElement("p");
  const bar = document.createElement("progress"), buttons = document.createElement("div");
  prompt.className = "prompt";
  prompt.textContent = prompt.title = job.record.body.prompt;
  detail.className = "hint";
  bar.setAttribute("aria-label", `Steps of ${job.record.body.prompt}`);
  buttons.className = "buttons";
  for (const [text, act] of [["Edit", () => reuse(job.record)], ["Cancel", () => cancel(job)]]) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "small", textContent: text });
    button.setAttribute("aria-label", `${text}: ${job.record.body.prompt}`);
    button.addEventListener("click", act);
    buttons.append(button);
  }
  row.append(prompt, buttons, detail, bar);
  return row;
}

function tell(job) {
  const { record, state, row, position, step, steps, left, note } = job, { n } = record.body;
  const [, buttons, detail, bar] = row.children, [edit, stop] = buttons.children;
  const parts = [];
  if (n > 1 && state !== "failed") parts.push(`image ${Math.min(record.done + 1, n)} of ${n}`);
  if (state === "waiting") parts.push("waits in this page");
  else if (note !== "") parts.push(note);
  else if (position > 0) parts.push(`${position} ${position === 1 ? "request" : "requests"} before this one`);
  else if (step > 0) parts.push(`step ${step} of ${steps}`);
  if (state !== "failed") parts.push(timeOf(Date.now() - record.at));
  const rest_ms = left === null ? 0 : 1000 * left.seconds + left.at - Date.now();
  if (state === "running" && left !== null) parts.push(`about ${timeOf(Math.max(1000, rest_ms))} left`);
  detail.textContent = parts.join(" · ");
  detail.className = state === "failed" ? "wrong" : "hint";
  edit.hidden = state !== "failed";
  if (state === "failed") {
    stop.textContent = "Dismiss";
    stop.setAttribute("aria-label", `Dismiss: ${record.body.prompt}`);
  }
  bar.hidden = state !== "running" || position > 0;
  bar.max = steps || 1;
  if (step > 0) bar.value = step;
  else bar.removeAttribute("value"); // which makes it a bar without an end
}

function timeOf(ms) {
  const seconds = Math.round(ms / 1000);
  return seconds < 100 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

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
    ...loras,
    `${seconds.toFixed(1)} s`,
  ];
  say("caption", body.prompt);
  say("about-picture", facts.filter((fact) => fact !== undefined).join(" · "));
  $("enlarge").hidden = isVideo(blob);
  $("input").hidden = isVideo(blob);
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
    ...(files.length > 0 ? ["Both lines read the input from the folder that they run in:"] : []),
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
  if (files.length > 0) words.push("--image", ...files.map(({ name }) => quoted(`./${name}`)));
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
  const parts = files.map(({ name }) => `-F ${quoted(`${field}=@"./${name.replaceAll(/["\\]/g, "\\$&")}"`)}`);
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
on("model", "change", () => {
  choose();
  save();
});
for (const id of ["size", "preset", "scheduler"]) on(id, "change", arrange);
on("files", "change", () => {
  const added = [...$("files").files].map((file) => ({ name: file.name, blob: file }));
  $("files").value = ""; // so that the same file can be chosen again
  take(imagesOf(model().seqpar) > 1 ? [...inputs, ...added] : added);
});
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
