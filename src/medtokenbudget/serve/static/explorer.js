// The explorer page: its state, and what happens when a sample, a file, a method or a budget is chosen.

import { chart } from "./chart.js";
import { curve } from "./curve.js";
import { asData, asPicture, saveBlob } from "./download.js";
import { patchColors } from "./draw.js";
import { engine, inPage } from "./engine.js";
import { downloadName, stem, listenForDrops, listenForPaste, sortFiles } from "./files.js";
import { cropPicture, lesionBoxes, lesionMask, maskPicture } from "./lesion.js";
import { Panel } from "./panel.js";
import { Sheet } from "./sheet.js";
import { at, lesionMap, percent, sentence } from "./view.js";

const byId = (id) => document.getElementById(id);
const STOPS = Array.from({ length: 100 }, (_, i) => Number(((i + 1) / 100).toFixed(2)));

const state = {
  info: null, // the model
  source: null, // {image, mask, title, file (name of the image file), truth, sample}
  answer: null,
  scene: null,
  index: 29, // into STOPS
  stops: [],
  promise: null, // the calibrated promise that holds for every image until the budget is moved, as a key
  names: { a: null, b: null }, // methods of the two panels
  compare: false,
  curve: "retention",
};
const panels = { a: new Panel("a", (name) => choose("a", name)), b: new Panel("b", (name) => choose("b", name)) };
const sheet = new Sheet(
  (image, mask, signal) => engine.route(image, mask, STOPS, signal),
  () => ({ method: state.names.a, budget: STOPS[state.index], stop: (answer) => answer.budgets.indexOf(STOPS[state.index]) }),
  ({ image, mask }) => analyze({ image, mask, title: image.name, file: image.name }, image.name),
);
let plot = null;
let running = null;
let frame = 0;
let announcement = 0;

function showError(message) {
  byId("alert-text").textContent = message;
  byId("alert").hidden = false;
  byId("alert").scrollIntoView({ block: "nearest" });
}

function hideError() {
  byId("alert").hidden = true;
}

// Start: the model, the samples, the first sample.

async function start() {
  if (inPage) byId("about-engine").textContent = " The model runs in this page: images stay on this device, and after loading nothing is sent or requested.";
  try {
    byId("loading").hidden = !inPage;
    await engine.open(showProgress);
    state.info = await engine.model();
    const list = (await engine.samples()).samples;
    showModel(state.info);
    await showSamples(list);
  } catch (error) {
    if (error.code === "token_required") askForToken();
    else showError(error.message);
  } finally {
    byId("loading").hidden = true;
  }
}

function showProgress({ done, total, text }) {
  const bar = byId("loading-bar");
  if (total) bar.value = done / total;
  else bar.removeAttribute("value");
  byId("loading-text").textContent = text ?? `${(done / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB. The model runs in this page; your images stay on this device.`;
}

function showModel(info) {
  state.names = { a: info.main, b: info.main === "center" ? null : "center" };
  const demo = info.demo ? "Demo model, trained on synthetic images · " : "";
  const count = info.classes.length;
  const classes = count === 0 ? "router only, no classes" : count === 1 ? "1 class" : `${count} classes`;
  byId("model-line").textContent = `${demo}Backbone ${info.backbone} · ${info.grid[0]} × ${info.grid[1]} patches · ${classes}`;
  byId("fingerprint").textContent = `Model ${info.fingerprint.slice(0, 16)} · MedTokenBudget ${info.version}`;
  byId("token-form").hidden = true;
  byId("loading").hidden = true;
  byId("app").hidden = false;
  fixBudget(info);
  showPanels();
}

// A backbone that runs on the kept patches alone has one budget: nothing to choose.
const onlyBudget = (info) => (info.budgets.length === 1 ? info.budgets[0] : null);

function fixBudget(info) {
  const only = onlyBudget(info);
  for (const control of [byId("budget"), ...document.querySelectorAll("[data-budget]")]) control.disabled = only !== null;
  if (only !== null) state.index = Math.max(0, Math.round(100 * only) - 1);
  if (!info.route) return;
  const ways = { scout: "routed before the first block", inside: `routed before block ${info.route.block}` };
  byId("model-line").append(` · ${ways[info.route.way]}`);
}

function askForToken() {
  byId("token-form").hidden = false;
  if (byId("token").value) showError("Wrong token. Try again.");
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  hideError();
  engine.setToken(byId("token").value.trim());
  start();
});

async function showSamples(list) {
  const buttons = list.map(sampleButton);
  byId("samples").replaceChildren(...buttons.map(({ button }) => button));
  // One after the other, because each is drawn on first use; the first one is opened.
  for (const { load, sample } of buttons) {
    await load();
    if (sample === list[0] && !state.source && !running) openSample(sample);
  }
}

function sampleButton(sample) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sample";
  button.dataset.sample = sample.id;
  button.setAttribute("aria-pressed", "false");
  const image = document.createElement("img");
  image.alt = "";
  image.width = 80;
  image.height = 80;
  const [name, remark] = sample.title.split(", ");
  button.append(image, name);
  if (remark) button.append(document.createElement("br"), remark);
  button.addEventListener("click", () => openSample(sample));
  const load = async () => {
    try {
      image.src = URL.createObjectURL(await engine.sampleFile(sample.id, "image"));
    } catch (error) {
      showError(error.message);
    }
  };
  return { button, load, sample };
}

async function openSample(sample) {
  try {
    const [image, mask] = await Promise.all([engine.sampleFile(sample.id, "image"), engine.sampleFile(sample.id, "mask")]);
    await analyze({ image, mask, title: `Sample ${sample.title}`, truth: sample.label, sample: sample.id });
  } catch (error) {
    showError(error.message);
  }
}

// One request per image: the answer covers every method and every budget. `file` is named in errors.

async function analyze(source, file) {
  hideError();
  const size = source.image.size + (source.mask?.size ?? 0);
  if (size > state.info.limits.max_bytes) {
    showError(`${file ?? source.title}: ${(size / 1e6).toFixed(1)} MB is too large. Files up to ${state.info.limits.max_bytes / 1e6} MB are accepted.`);
    return;
  }
  running?.abort();
  const mine = new AbortController();
  running = mine;
  byId("busy").hidden = false;
  try {
    const answer = await engine.route(source.image, source.mask, onlyBudget(state.info) === null ? STOPS : state.info.budgets, mine.signal);
    const picture = new Image();
    picture.src = answer.image.preview;
    await picture.decode();
    URL.revokeObjectURL(picture.src);
    if (running === mine) show(source, answer, picture);
  } catch (error) {
    if (error.name === "AbortError" || running !== mine) return;
    showError(file ? `${file}: ${error.message}` : error.message);
    if (error.code === "token_required") askForToken();
  } finally {
    if (running === mine) byId("busy").hidden = true;
  }
}

function show(source, answer, picture) {
  hideError();
  state.source = source;
  state.answer = answer;
  state.stops = STOPS.map((stop) => (answer.budgets.length === 1 ? 0 : answer.budgets.indexOf(stop)));
  state.scene = { picture, grid: answer.grid, colors: patchColors(picture, answer.grid), lesion: lesionMap(answer) };
  byId("app").dataset.ready = "";
  const names = answer.selectors.map((selector) => selector.name);
  const { main } = state.info;
  if (!names.includes(state.names.a)) state.names.a = main;
  if (!names.includes(state.names.b)) state.names.b = names.find((name) => name !== main) ?? main;
  for (const side of ["a", "b"]) {
    panels[side].offer(answer.selectors.map(({ name }) => described(name)), state.names[side]);
    panels[side].classes(answer.classes, source.truth);
  }
  for (const button of document.querySelectorAll(".sample")) button.setAttribute("aria-pressed", String(button.dataset.sample === source.sample));
  byId("image-line").textContent = imageLine(source, answer);
  byId("unfamiliar").hidden = !(answer.unfamiliarity > 1);
  const locked = Boolean(source.sample);
  byId("mask-file").disabled = locked;
  byId("mask-label").toggleAttribute("data-off", locked);
  byId("mask-label").textContent = source.mask && !locked ? "Change mask…" : "Add mask…";
  byId("show-lesion").disabled = !answer.lesion;
  byId("lesion-switch").toggleAttribute("data-off", !answer.lesion);
  drawPromises();
  drawCurve();
  render();
}

function imageLine(source, answer) {
  const { lesion, n } = answer;
  let about = "no mask";
  if (lesion) about = lesion.length ? `lesion on ${lesion.length} of ${n} patches` : "the mask covers none of the patches, so there is no retention";
  const synthetic = source.sample ? " (synthetic)" : "";
  return `${source.title}${synthetic} · ${answer.image.width} × ${answer.image.height} pixels · ${about}`;
}

// One or two panels.

function showPanels() {
  const shown = state.compare ? [panels.a, panels.b] : [panels.a];
  byId("panels").replaceChildren(...shown.map((panel) => panel.root));
  byId("panels").classList.toggle("two", state.compare);
}

const sides = () => (state.compare ? ["a", "b"] : ["a"]);
const described = (name) => state.info.selectors.find((selector) => selector.name === name);
const selectorOf = (side) => state.answer.selectors.find((selector) => selector.name === state.names[side]);
const titleOf = (side) => described(state.names[side]).title;

function choose(side, name) {
  state.names[side] = name;
  panels[side].describe(described(name));
  drawCurve();
  render();
}

// Rendering: no request, one frame.

function render() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(paintAll);
}

function current(side) {
  const selector = selectorOf(side);
  const show = {
    scores: byId("show-scores").checked ? selector.scores : null,
    lesion: byId("show-lesion").checked && Boolean(state.scene.lesion),
  };
  return { title: titleOf(side), view: at(state.answer, selector, state.stops[state.index]), show };
}

function paintAll() {
  if (!state.answer) return;
  const shown = sides().map((side) => ({ side, ...current(side) }));
  for (const { side, title, view, show: what } of shown) panels[side].render(title, state.scene, view, what);
  const budget = onlyBudget(state.info) ?? STOPS[state.index];
  const { view } = shown[0];
  const slider = byId("budget");
  byId("budget-value").textContent = percent(budget);
  byId("k-value").textContent = `${view.k} of ${view.n} patches`;
  for (const button of document.querySelectorAll("[data-promise]")) button.setAttribute("aria-pressed", String(button.dataset.promise === state.promise));
  byId("code").textContent = code();
  for (const kind of ["mask", "box", "crop"]) {
    const button = byId(`save-${kind}`);
    button.disabled = !selectorOf("a").lesion_map;
    button.title = button.disabled ? `${titleOf("a")} gives no lesion probability` : "";
  }
  slider.value = String(state.index + 1);
  slider.setAttribute("aria-valuetext", `${percent(budget)}, ${view.k} of ${view.n} patches`);
  plot?.move(state.stops[state.index]);
  sheet.update();
  clearTimeout(announcement);
  announcement = setTimeout(() => {
    byId("summary").textContent = `Budget ${percent(budget)}. ${shown.map((panel) => sentence(panel.title, panel.view)).join(" ")}`;
  }, 500);
}

// Buttons for what the main method was calibrated for. One that is on stays on for other images, with what each of them needs.

const keyOf = ({ retention, coverage }) => `${retention}/${coverage}`;
const promised = () => state.answer.selectors.find((one) => one.name === state.info.main)?.promises ?? [];

function setBudget(index, promise = null) {
  state.index = index;
  state.promise = promise;
  render();
}

function keepPromise(promise) {
  setBudget(Math.min(STOPS.length, Math.ceil((100 * promise.k) / state.answer.n)) - 1, keyOf(promise));
}

function drawPromises() {
  const promises = promised();
  byId("promises").hidden = !promises.length;
  const label = document.createElement("span");
  label.className = "quiet";
  label.textContent = "Lesion kept on average";
  const buttons = promises.map((promise) => {
    const { retention, coverage } = promise;
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.promise = keyOf(promise);
    button.textContent = `${percent(retention)}${coverage ? ` in ${percent(coverage)}` : ""}`;
    button.title = `${percent(retention)} of the lesion ${coverage ? `in ${percent(coverage)} of the images` : "on average"}: ${promise.k} of ${state.answer.n} patches of this image`;
    button.addEventListener("click", () => keepPromise(promise));
    return button;
  });
  byId("promises").replaceChildren(label, ...buttons);
  const kept = promises.find((promise) => keyOf(promise) === state.promise);
  if (kept) keepPromise(kept);
  else state.promise = null;
}

/** What does the same from Python. */
function code() {
  const { info } = state;
  const name = state.names.a;
  const selector = name === info.main ? "" : `, selector="${name}"`;
  const [retention, coverage] = state.promise?.split("/") ?? [];
  const guarantee = `model.guarantee(${retention}${coverage === "null" ? "" : `, coverage=${coverage}`})`;
  const budget = state.promise ? guarantee : (onlyBudget(info) ?? STOPS[state.index]);
  const model = info.demo ? "runs/demo/model" : info.name;
  const route = `model = mtb.load("${model}")\nmodel.route("photo.jpg", budget=${budget}${selector})`;
  // `mtb.wrap` takes the model's main method, at any budget, and a promise that holds on average.
  if (selector || onlyBudget(info) || (state.promise && coverage !== "null")) return route;
  return `${route}\nfast = mtb.wrap(vit, router="${model}", ${retention ? `retention=${retention}` : `budget=${budget}`})  # your own transformer`;
}

function drawCurve() {
  const { answer, info, source } = state;
  const shown = sides().map((side) => ({ side, title: titleOf(side), selector: selectorOf(side) }));
  const found = curve(answer, shown, state.curve, info.main, source.truth);
  byId("curve-retention").disabled = !found.possible;
  byId("curve-retention").setAttribute("aria-pressed", String(found.retention));
  byId("curve-probability").setAttribute("aria-pressed", String(!found.retention && found.lines.length > 0));
  byId("curve-probability").disabled = !answer.classes.length;
  byId("chart").hidden = !found.lines.length;
  plot = found.lines.length ? chart(byId("chart"), answer.budgets, found.lines, found.title) : null;
  plot?.move(state.stops[state.index]);
  byId("curve-text").textContent = found.text;
}

// Controls.

byId("budget").addEventListener("input", (event) => {
  setBudget(Number(event.target.value) - 1);
});
for (const button of document.querySelectorAll("[data-budget]")) {
  button.addEventListener("click", () => {
    setBudget(Number(button.dataset.budget) - 1);
  });
}
byId("compare").addEventListener("change", (event) => {
  state.compare = event.target.checked;
  showPanels();
  if (!state.answer) return;
  drawCurve();
  render();
});
for (const id of ["show-scores", "show-lesion"]) byId(id).addEventListener("change", render);
for (const kind of ["retention", "probability"]) {
  byId(`curve-${kind}`).addEventListener("click", () => {
    state.curve = kind;
    if (state.answer) drawCurve();
  });
}
byId("alert-close").addEventListener("click", hideError);

// Files.

function openFiles(files) {
  if (!state.info) return;
  hideError();
  const { image, mask, stack, skipped } = sortFiles(files, state.source?.file ?? null);
  if (stack?.length) sheet.open(stack, skipped);
  else if (stack) showError("None of these files is an image.");
  else if (image) analyze({ image, mask, title: image.name, file: image.name }, image.name);
  else addMask(mask);
}

const addMask = (mask) => analyze({ ...state.source, mask }, mask.name);

for (const id of ["image-file", "folder", "camera"]) {
  byId(id).addEventListener("change", (event) => {
    const files = [...event.target.files];
    if (files.length === 1) analyze({ image: files[0], title: files[0].name, file: files[0].name }, files[0].name);
    else if (files.length) openFiles(files);
    event.target.value = "";
  });
}
byId("mask-file").addEventListener("change", (event) => {
  const [mask] = event.target.files;
  if (mask && state.source) addMask(mask);
  event.target.value = "";
});
listenForDrops(byId("drop"), openFiles);
listenForPaste(openFiles);

// Downloads.

byId("save-picture").addEventListener("click", async () => {
  if (!state.answer) return;
  const blob = await asPicture(sides().map(current), state.scene, STOPS[state.index], state.info.notice);
  saveBlob(blob, downloadName(state.source, state.index + 1, "png"));
});
byId("save-data").addEventListener("click", () => {
  if (!state.answer) return;
  const data = asData(state.answer, sides().map((side) => state.names[side]), STOPS[state.index]);
  saveBlob(new Blob([JSON.stringify(data)], { type: "application/json" }), downloadName(state.source, state.index + 1, "json"));
});

// The lesion that the first method sees, in pixels of the image.
async function saveLesion(kind) {
  const { answer, source, scene } = state;
  const { width, height } = answer.image;
  const mask = lesionMask(selectorOf("a").lesion_map, width, height);
  const boxes = kind === "mask" ? [] : lesionBoxes(mask, width, height);
  if (kind === "crop" && !boxes.length) {
    showError("The model sees no lesion in this image.");
    return;
  }
  let blob = new Blob([JSON.stringify({ image: { width, height }, boxes })], { type: "application/json" });
  if (kind === "mask") blob = await maskPicture(mask, width, height);
  if (kind === "crop") blob = await cropPicture(source.image, scene.picture, boxes[0], width, height);
  saveBlob(blob, `${stem(source.file ?? source.sample)}_${kind}.${kind === "box" ? "json" : "png"}`);
}
for (const kind of ["mask", "box", "crop"]) byId(`save-${kind}`).addEventListener("click", () => saveLesion(kind));

byId("copy-code").addEventListener("click", async () => {
  await navigator.clipboard.writeText(`import medtokenbudget as mtb\n\n${code()}`);
  byId("copy-code").textContent = "Copied";
  setTimeout(() => (byId("copy-code").textContent = "Copy Python"), 2000);
});

let width = innerWidth;
addEventListener("resize", () => {
  if (!state.answer || innerWidth === width) return;
  width = innerWidth;
  drawCurve();
  render();
});

start();
