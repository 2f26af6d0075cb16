// --- the mask: what of an image is repainted

const TINT = [225, 30, 140]; // of what is painted
const THUMBNAIL = 176; // pixels
let painting = null; // what the dialog paints on: { input, strokes, at }; at: the brush, in pixels of the image

function canvasOf(width, height, canvas = document.createElement("canvas")) {
  Object.assign(canvas, { width, height });
  return canvas.getContext("2d", { willReadFrequently: true });
}

function hasAlpha(data, holds) {
  for (let at = 3; at < data.length; at += 4) if (holds(data[at])) return true;
  return false;
}

// the paint of a mask's file: where it is transparent, or white where nothing is
function paintOf(bitmap, width, height, canvas) {
  const context = canvasOf(width, height, canvas);
  context.drawImage(bitmap, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height), { data } = pixels;
  const opaque = !hasAlpha(data, (alpha) => alpha < 255);
  for (let at = 0; at < data.length; at += 4) {
    const alpha = opaque ? Math.round((data[at] + data[at + 1] + data[at + 2]) / 3) : 255 - data[at + 3];
    data.set([...TINT, alpha], at);
  }
  context.putImageData(pixels, 0, 0);
  return context;
}

// the mask's file of what is painted, as the server reads it; null if nothing is
async function maskOf(paper) {
  const { data } = paper.getContext("2d").getImageData(0, 0, paper.width, paper.height);
  if (!hasAlpha(data, (alpha) => alpha > 0)) return null;
  const context = canvasOf(paper.width, paper.height);
  context.fillRect(0, 0, paper.width, paper.height);
  context.globalCompositeOperation = "destination-out";
  context.drawImage(paper, 0, 0);
  return new Promise((resolve) => context.canvas.toBlob(resolve, "image/png"));
}

function maskOver({ mask }) {
  const canvas = document.createElement("canvas");
  createImageBitmap(mask).then((bitmap) => {
    const scale = Math.min(1, THUMBNAIL / Math.max(bitmap.width, bitmap.height));
    paintOf(bitmap, ...[bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale))), canvas);
  });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Its mask");
  return canvas;
}

// --- the dialog

async function openPainter(input) {
  const image = await createImageBitmap(input.blob).catch(() => null); // turned as its camera says, as by the server
  if (image === null) return mark("image", `${input.name} is no image that this browser can show.`);
  const { width, height } = image;
  const strokes = input.strokes ?? (input.mask ? [{ paint: paintOf(await createImageBitmap(input.mask), width, height).canvas }] : []);
  painting = { input, strokes: [...strokes], at: [width / 2, height / 2] };
  canvasOf(width, height, $("paper"));
  Object.assign($("below"), { src: input.url, alt: input.name });
  say("no-mask", "");
  $("painter").showModal();
  redraw();
  $("paper").focus();
}

function redraw() {
  const context = $("paper").getContext("2d"), { width, height } = $("paper");
  context.clearRect(0, 0, width, height);
  for (const { paint, points, ...stroke } of painting.strokes) {
    if (!points) context.clearRect(0, 0, width, height); // before a mask from a file, or for none
    if (paint) context.drawImage(paint, 0, 0);
    points?.forEach((point, index) => line(stroke, points[Math.max(0, index - 1)], point));
  }
  $("undo").disabled = painting.strokes.length === 0;
}

function line({ erases, width }, from, to) {
  const context = $("paper").getContext("2d");
  context.globalCompositeOperation = erases ? "destination-out" : "source-over";
  context.fillStyle = context.strokeStyle = `rgb(${TINT})`;
  Object.assign(context, { lineWidth: width, lineCap: "round" });
  context.beginPath();
  context.arc(...to, width / 2, 0, 2 * Math.PI); // a line without length has no ends in all browsers
  context.fill();
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
  context.globalCompositeOperation = "source-over";
}

const brushWidth = () => (Math.max($("paper").width, $("paper").height) * $("brush").valueAsNumber) / 100;

function beginStroke(point) {
  const erases = $("erase").getAttribute("aria-pressed") === "true";
  painting.strokes.push({ erases, width: brushWidth(), points: [point] });
  line(painting.strokes.at(-1), point, point);
  $("undo").disabled = false;
}

function extendStroke(point) {
  const stroke = painting.strokes.at(-1);
  line(stroke, stroke.points.at(-1), point);
  stroke.points.push(point);
}

// where the image lies in the canvas on the screen
function placed() {
  const box = $("paper").getBoundingClientRect(), { width, height } = $("paper");
  const scale = Math.min(box.width / width, box.height / height);
  return { scale, left: box.left + (box.width - width * scale) / 2, top: box.top + (box.height - height * scale) / 2 };
}

function pointOf({ clientX, clientY }) {
  const { scale, left, top } = placed();
  return [(clientX - left) / scale, (clientY - top) / scale];
}

function moveBrush(point) {
  painting.at = point;
  const { scale, left, top } = placed(), board = $("board").getBoundingClientRect(), side = `${brushWidth() * scale}px`;
  const place = { left: `${left + point[0] * scale - board.left}px`, top: `${top + point[1] * scale - board.top}px` };
  Object.assign($("ring").style, { ...place, width: side, height: side });
  $("ring").hidden = false;
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function paintByKey(event) {
  const { width, height } = $("paper"), { at } = painting, arrow = ARROWS[event.key];
  if (event.key !== " " && !arrow) return;
  event.preventDefault();
  const step = Math.max(1, brushWidth() / 2), inside = (value, most) => Math.min(Math.max(value, 0), most);
  moveBrush(arrow ? [inside(at[0] + arrow[0] * step, width), inside(at[1] + arrow[1] * step, height)] : at);
  if (!arrow || event.shiftKey) beginStroke(at);
  if (arrow && event.shiftKey) extendStroke(painting.at);
}

async function usePaint() {
  const { input, strokes } = painting;
  input.mask = await maskOf($("paper"));
  input.strokes = input.mask && strokes;
  $("painter").close();
}

function addStroke(stroke) {
  painting.strokes.push(stroke);
  redraw();
}

function undo() {
  painting.strokes.pop();
  redraw();
  if ($("undo").disabled) $("paper").focus(); // a disabled button loses it
}

async function takeMask({ name, blob }) {
  const bitmap = await createImageBitmap(blob).catch(() => null), { width, height } = $("paper");
  say("no-mask", bitmap === null ? `${name} is no image that this browser can show.` : "");
  if (bitmap !== null) addStroke({ paint: paintOf(bitmap, width, height).canvas });
}

on("paint", "click", () => openPainter(inputs[0]));
on("unmask", "click", () => {
  Object.assign(inputs[0], { mask: null, strokes: null });
  unmark("paint");
  arrange();
  keepImages();
  $("paint").focus();
});
on("paper", "pointerdown", (event) => {
  if (!event.isPrimary || event.button !== 0) return; // of several fingers the first one paints
  event.target.setPointerCapture(event.pointerId);
  moveBrush(pointOf(event));
  beginStroke(painting.at);
});
on("paper", "pointermove", (event) => {
  if (!event.isPrimary) return;
  if (event.target.hasPointerCapture(event.pointerId)) extendStroke(pointOf(event));
  moveBrush(pointOf(event));
});
on("paper", "pointerleave", () => ($("ring").hidden = true));
on("paper", "keydown", paintByKey);
on("erase", "click", () => $("erase").setAttribute("aria-pressed", $("erase").getAttribute("aria-pressed") === "false"));
on("brush", "input", () => moveBrush(painting.at));
on("undo", "click", undo);
on("blank", "click", () => addStroke({}));
on("mask-file", "change", async () => (await chosenIn("mask-file")).forEach(takeMask));
on("painter", "keydown", (event) => {
  if (event.key.toLowerCase() !== "z" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  undo();
});
on("painted", "click", usePaint);
on("painter", "cancel", (event) => {
  event.preventDefault(); // until the mask is made of what is painted
  usePaint();
});
on("painter", "close", () => {
  painting = null;
  unmark("paint");
  arrange();
  keepImages();
  $("paint").focus();
});
