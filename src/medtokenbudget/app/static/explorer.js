// The page: what is shown, and what happens on a click, a drop, a move of the slider. Everything else is in the files it imports.

import * as api from "./api.js";
import { chart } from "./chart.js";
import { patchColours } from "./draw.js";
import { asData, asPicture, saveBlob } from "./download.js";
import { Panel } from "./panel.js";
import { at, lesionMap, percent, sentence } from "./view.js";

const byId = (id) => document.getElementById(id);
const STOPS = Array.from({ length: 100 }, (_, i) => Number(((i + 1) / 100).toFixed(2)));

const state = {
  info: null,
  source: null, // {image, mask, title, truth, sample}
  answer: null,
  scene: null,
  index: 29,
  stops: [],
  names: { a: "lats", b: "center" },
  compare: false,
  curve: "retention",
};
const panels = { a: new Panel("a", (name) => choose("a", name)), b: new Panel("b", (name) => choose("b", name)) };
let line = null;
let running = null;
let frame = 0;
let spoken = 0;

function complain(message) {
  byId("alert-text").textContent = message;
  byId("alert").hidden = false;
  byId("alert").scrollIntoView({ block: "nearest" });
}

const calm = () => {
  byId("alert").hidden = true;
};

// Beginning: the model, the samples, the first picture.

async function start() {
  api.takeTokenFromAddress();
  try {
    state.info = await api.model();
  } catch (error) {
    if (error.code === "token_required") askForToken();
    else if (error.code === "no_model") byId("no-model").hidden = false;
    else complain(error.message);
    return;
  }
  byId("token-form").hidden = true;
  byId("app").hidden = false;
  const { info } = state;
  byId("model-line").textContent = `${info.demo ? "Demo model, trained on drawn images · " : ""}${info.backbone} · ${info.grid[0]} × ${info.grid[1]} patches · ${info.classes.length} classes`;
  byId("fingerprint").textContent = `Model ${info.fingerprint.slice(0, 16)} · medtokenbudget ${info.version}`;
  showPanels();
  const list = (await api.samples()).samples;
  const buttons = list.map(sampleButton);
  byId("samples").replaceChildren(...buttons.map(({ button }) => button));
  // One after the other: the first is also the one that is looked at first.
  for (const { load, sample } of buttons) {
    await load();
    if (sample === list[0] && !state.source) openSample(sample);
  }
}

function askForToken() {
  byId("token-form").hidden = false;
  if (byId("token").value) complain("That was not the token.");
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  calm();
  api.setToken(byId("token").value.trim());
  start();
});

function sampleButton(sample) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sample";
  button.dataset.sample = sample.id;
  button.setAttribute("aria-pressed", "false");
  const picture = document.createElement("img");
  picture.alt = "";
  picture.width = 80;
  picture.height = 80;
  button.append(picture, document.createTextNode(sample.title));
  button.addEventListener("click", () => openSample(sample));
  const load = async () => {
    try {
      picture.src = URL.createObjectURL(await api.sampleFile(sample.id, "image"));
    } catch (error) {
      complain(error.message);
    }
  };
  return { button, load, sample };
}

async function openSample(sample) {
  try {
    const [image, mask] = await Promise.all([api.sampleFile(sample.id, "image"), api.sampleFile(sample.id, "mask")]);
    await look({ image, mask, title: `Sample ${sample.title}, drawn, with its mask`, truth: sample.label, sample: sample.id });
  } catch (error) {
    complain(error.message);
  }
}

// A picture: one request, then everything is known for every budget.

async function look(source) {
  calm();
  const size = source.image.size + (source.mask?.size ?? 0);
  if (size > state.info.limits.max_bytes) {
    complain(`${source.title} has ${(size / 1e6).toFixed(1)} MB; this server takes ${state.info.limits.max_bytes / 1e6} MB. Reduce it first.`);
    return;
  }
  running?.abort();
  const mine = new AbortController();
  running = mine;
  byId("busy").hidden = false;
  try {
    const answer = await api.route(source.image, source.mask, STOPS, mine.signal);
    const picture = new Image();
    picture.src = answer.image.preview;
    await picture.decode();
    if (running === mine) show(source, answer, picture);
  } catch (error) {
    if (error.name === "AbortError") return;
    const message = `${error.message.charAt(0).toUpperCase()}${error.message.slice(1)}`;
    complain(source.name ? `${source.name}: ${message}` : message);
    if (error.code === "token_required") askForToken();
  } finally {
    if (running === mine) byId("busy").hidden = true;
  }
}

function show(source, answer, picture) {
  state.source = source;
  state.answer = answer;
  state.stops = STOPS.map((stop) => answer.budgets.indexOf(stop));
  state.scene = { picture, grid: answer.grid, colours: patchColours(picture, answer.grid), lesion: lesionMap(answer) };
  const names = answer.selectors.map((selector) => selector.name);
  for (const side of ["a", "b"]) {
    if (!names.includes(state.names[side])) state.names[side] = side === "a" ? "lats" : names.find((name) => name !== "lats") ?? "lats";
    panels[side].offer(names, state.names[side]);
    panels[side].classes(answer.classes, source.truth);
  }
  for (const button of document.querySelectorAll(".sample")) button.setAttribute("aria-pressed", String(button.dataset.sample === source.sample));
  const lesion = answer.lesion;
  const about = !lesion ? "no mask" : lesion.length ? `lesion on ${lesion.length} of ${answer.n} patches` : "the mask leaves no lesion patch on this grid, so there is no retention";
  byId("picture-line").textContent = `${source.title} · ${answer.image.width} × ${answer.image.height} pixels · ${about}`;
  const locked = Boolean(source.sample);
  byId("mask-file").disabled = locked;
  byId("mask-label").toggleAttribute("data-off", locked);
  byId("mask-label").textContent = source.mask && !locked ? "Change mask…" : "Add mask…";
  byId("show-lesion").disabled = !lesion;
  byId("lesion-switch").toggleAttribute("data-off", !lesion);
  drawCurve();
  render();
}

// Two panels or one.

function showPanels() {
  const shown = state.compare ? [panels.a, panels.b] : [panels.a];
  byId("panels").replaceChildren(...shown.map((panel) => panel.root));
  byId("panels").classList.toggle("two", state.compare);
}

const sides = () => (state.compare ? ["a", "b"] : ["a"]);
const selectorOf = (side) => state.answer.selectors.find((selector) => selector.name === state.names[side]);

function choose(side, name) {
  state.names[side] = name;
  panels[side].offer(state.answer.selectors.map((selector) => selector.name), name);
  drawCurve();
  render();
}

// A move of the slider: no request, one frame.

function render() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(paintAll);
}

function showing(selector) {
  return {
    scores: byId("show-scores").checked ? selector.scores : null,
    lesion: byId("show-lesion").checked && Boolean(state.scene.lesion),
  };
}

function current(side) {
  const selector = selectorOf(side);
  return { name: selector.name, view: at(state.answer, selector, state.stops[state.index]), show: showing(selector) };
}

function paintAll() {
  if (!state.answer) return;
  const shown = sides().map((side) => ({ side, ...current(side) }));
  for (const { side, name, view, show: what } of shown) panels[side].render(name, state.scene, view, what);
  const budget = STOPS[state.index];
  const { view } = shown[0];
  const slider = byId("budget");
  byId("budget-value").textContent = percent(budget);
  byId("k-value").textContent = `K = ${view.k} of ${view.n} patches`;
  slider.value = String(state.index + 1);
  slider.setAttribute("aria-valuetext", `${percent(budget)}, ${view.k} of ${view.n} patches`);
  line?.move(state.stops[state.index]);
  clearTimeout(spoken);
  spoken = setTimeout(() => {
    byId("summary").textContent = `Budget ${percent(budget)}. ${shown.map((panel) => sentence(panel.name, panel.view)).join(" ")}`;
  }, 500);
}

function drawCurve() {
  const { answer } = state;
  const shown = sides().map((side) => ({ side, selector: selectorOf(side) }));
  const possible = shown.some(({ selector }) => selector.retention);
  const retention = possible && state.curve === "retention";
  byId("curve-retention").disabled = !possible;
  byId("curve-retention").setAttribute("aria-pressed", String(retention));
  byId("curve-probability").setAttribute("aria-pressed", String(!retention));
  const lines = retention ? retentionLines(shown) : probabilityLines(shown);
  const title = retention ? "Retention over the budgets" : "Class probability over the budgets";
  line = chart(byId("chart"), answer.budgets, lines, title);
  line.move(state.stops[state.index]);
  byId("curve-text").textContent = curveText(shown, retention, possible);
}

function retentionLines(shown) {
  const { answer } = state;
  // Of a selector that keeps K by the budget; the one that keeps all would have no ceiling below 100 %.
  const reference = answer.selectors.find((s) => s.ceiling && s.name === "lats") ?? shown.find((s) => s.selector.ceiling).selector;
  const lines = [
    { style: "ceiling", name: "ceiling", values: reference.ceiling },
    { style: "random", name: "random, expected", values: reference.k.map((k) => k / answer.n) },
  ];
  for (const { side, selector } of shown) if (selector.retention) lines.push({ style: side, name: selector.name, values: selector.retention, point: true });
  return lines;
}

function probabilityLines(shown) {
  const { answer } = state;
  return shown.map(({ side, selector }) => {
    const name = followed();
    return { style: side, name: `${selector.name}: ${name}`, values: selector.probabilities.map((row) => row[answer.classes.indexOf(name)]), point: true };
  });
}

/** The class whose probability the curve follows: the drawn one where it is known, else the first selector's over all budgets. */
function followed() {
  const { answer, source } = state;
  if (answer.classes.includes(source.truth)) return source.truth;
  const rows = selectorOf("a").probabilities;
  const sums = answer.classes.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0));
  return answer.classes[sums.indexOf(Math.max(...sums))];
}

function curveText(shown, retention, possible) {
  if (retention) return "Share of the lesion's patches that is kept. The dashed line is the most that K patches can keep, the dotted one what drawing blindly keeps on average.";
  const what = `Probability of ${followed()}, by each selector's own head.`;
  if (possible) return what;
  return state.answer.lesion ? `${what} A merger has no retention.` : `${what} Add a mask to see how much of the lesion stays.`;
}

// Controls.

byId("budget").addEventListener("input", (event) => {
  state.index = Number(event.target.value) - 1;
  render();
});
for (const button of document.querySelectorAll("[data-budget]")) {
  button.addEventListener("click", () => {
    state.index = Number(button.dataset.budget) - 1;
    render();
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
byId("alert-close").addEventListener("click", calm);

// Files: chosen or dropped. A second file whose name says mask or segmentation is the mask.

const isMask = (file) => /mask|segment|_seg\b/i.test(file.name);

function openFiles(files) {
  if (!state.info) return;
  const mask = files.length > 1 ? files.find(isMask) : undefined;
  const image = files.find((file) => file !== mask);
  if (!image) return;
  if (files.length > 2 || (files.length === 2 && !mask)) {
    complain("Drop one picture, or a picture and its mask (with 'mask' or 'segmentation' in the mask's name).");
    return;
  }
  look({ image, mask, title: image.name, name: image.name });
}

byId("image-file").addEventListener("change", (event) => {
  openFiles([...event.target.files]);
  event.target.value = "";
});
byId("mask-file").addEventListener("change", (event) => {
  const [mask] = event.target.files;
  if (mask && state.source) look({ ...state.source, mask, name: mask.name });
  event.target.value = "";
});

let over = 0;
const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragenter", (event) => {
  if (!hasFiles(event)) return;
  over += 1;
  byId("drop").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!hasFiles(event)) return;
  over -= 1;
  if (over <= 0) byId("drop").hidden = true;
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  over = 0;
  byId("drop").hidden = true;
  openFiles([...event.dataTransfer.files]);
});

// Downloads.

const stem = () => (state.source.name ?? state.source.sample ?? "image").replace(/\.[^.]*$/, "");

byId("save-picture").addEventListener("click", async () => {
  if (!state.answer) return;
  const blob = await asPicture(sides().map(current), state.scene, STOPS[state.index], state.info.notice);
  saveBlob(blob, `${stem()}-${state.index + 1}.png`);
});
byId("save-data").addEventListener("click", () => {
  if (!state.answer) return;
  const data = asData(state.answer, sides().map((side) => state.names[side]), STOPS[state.index]);
  saveBlob(new Blob([JSON.stringify(data)], { type: "application/json" }), `${stem()}-${state.index + 1}.json`);
});

// Colours: as the system, light, dark.

const THEMES = ["auto", "light", "dark"];
function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  byId("theme-name").textContent = theme;
  byId("theme").dataset.shown = theme;
}
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("mtb-theme", next);
  } catch {
    // Storage is switched off: the choice lasts as long as the page.
  }
  showTheme();
});

let width = innerWidth;
addEventListener("resize", () => {
  if (!state.answer || innerWidth === width) return;
  width = innerWidth;
  drawCurve();
  render();
});

showTheme();
start();
