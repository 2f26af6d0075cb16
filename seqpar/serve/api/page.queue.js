// --- the queue of this tab

function generate() {
  const body = asked(), films = model().seqpar.makes === "videos";
  const files = filesAsked(), route = films ? VIDEOS : files.length > 0 ? EDITS : GENERATIONS;
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
  lookForLoaded();
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
  for (const file of files) form.append(file.role ?? name, file.blob, file.name);
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
  if (state !== "failed") parts.push(`${timeOf(Date.now() - record.at)} so far`);
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
  const seconds = Math.round(ms / 1000), text = seconds < 100 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return text.replaceAll(" ", "\u00a0"); // no line ends between a number and its unit
}

