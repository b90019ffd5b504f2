// The model in a web worker, so that the page stays responsive: files to bytes, bytes to graphs, images to answers.

import { load } from "./loading.js";
import { methodAnswer, rank, scoresFromMask } from "./answer.js";
import { canvasIsFaithful, decode, lesionOf, outOfMemory, preview, resized } from "./pixels.js";

let site; // site.json
let ort;
let graphs; // {tokens, heads}
const canceled = new Set();

async function open({ description, root }, report) {
  site = description;
  if (!canvasIsFaithful()) {
    const advice = "Allow this site to read canvas data, or use another browser or a window that is not private.";
    throw Object.assign(new Error(`This browser changes the pixels of images, as a protection against fingerprinting, so the results would be wrong. ${advice}`), { code: "canvas" });
  }
  const files = await load(site, root, report);
  report({ text: "Starting the model…" });
  ort = await import(new URL(site.runtime.script, root).href);
  ort.env.wasm.numThreads = 1; // more need a server that isolates the page
  ort.env.wasm.wasmBinary = files[site.runtime.binary];
  ort.env.logLevel = "error";
  graphs = {};
  for (const [name, path] of Object.entries(site.graphs.files)) graphs[name] = await ort.InferenceSession.create(files[path], { executionProviders: ["wasm"] });
}

async function route({ image, mask, budgets }) {
  const { grid, classes, limits } = site.model;
  const { image_size: size, interpolation } = site.preprocessing;
  const bitmap = await decode(image, "The image", limits.max_pixels);
  const maskBitmap = mask ? await decode(mask, "The mask", limits.max_pixels) : null;
  try {
    const lesion = maskBitmap ? lesionOf(maskBitmap, bitmap, grid) : null;
    const pixels = resized(bitmap, size, size, interpolation, 3, "The image").data;
    const all = [...new Set([...site.model.budgets, ...budgets])].sort((a, b) => a - b);
    const tokens = await graphs.tokens.run({ pixels: new ort.Tensor("uint8", pixels, [1, size, size, 3]) });
    const selectors = await methods(tokens, lesion, all, classes.length);
    return {
      model: site.model.fingerprint,
      notice: site.model.notice,
      image: { width: bitmap.width, height: bitmap.height, preview: await preview(bitmap) },
      grid,
      n: site.model.n,
      classes,
      budgets: all,
      unfamiliarity: tokens.unfamiliarity ? Number(tokens.unfamiliarity.data[0].toFixed(4)) : null,
      lesion: lesion && Array.from(lesion.keys()).filter((patch) => lesion[patch]),
      selectors,
    };
  } finally {
    bitmap.close();
    maskBitmap?.close();
  }
}

async function methods({ patches, scores, lesion: finer }, lesion, budgets, classes) {
  const { grid, n } = site.model;
  const { ranked, fixed, methods: names } = site.graphs;
  const scoresOf = (name) => {
    const { selector } = describedBy(name);
    if (ranked.includes(name)) return scores.data.subarray(ranked.indexOf(name) * n, (ranked.indexOf(name) + 1) * n);
    return fixed[name] ?? scoresFromMask(selector, lesion ?? new Uint8Array(n), grid);
  };
  const all = names.map(scoresOf);
  const orders = all.map(rank);
  const logits = graphs.heads ? await headsOf(patches, orders) : null; // a router without a head predicts no class
  return names
    .map((name, i) => [describedBy(name), i])
    .filter(([method]) => lesion || !method.needs_mask)
    .map(([method, i]) => {
      const promises = site.graphs.promises.filter(({ selector }) => selector === method.name);
      const seen = { scores: { grid, values: all[i] }, lesion: finer && { grid: finer.dims, values: finer.data } }[method.lesion_map] ?? null;
      return methodAnswer(method, seen, promises, orders[i], all[i], logits?.subarray(i * n * classes, (i + 1) * n * classes), budgets, lesion, classes);
    });
}

async function headsOf(patches, orders) {
  const flat = BigInt64Array.from(orders.flat(), BigInt);
  const { logits } = await graphs.heads.run({ patches, orders: new ort.Tensor("int64", flat, [orders.length, orders[0].length]) });
  return logits.data;
}

const describedBy = (name) => site.model.selectors.find((selector) => selector.name === name);

// One message after the other; an answer that nobody waits for any more is not computed.

let last = Promise.resolve();

self.addEventListener("message", ({ data }) => {
  if (data.kind === "cancel") canceled.add(data.id);
  else last = last.then(() => handle(data));
});

async function handle({ id, kind, ...question }) {
  if (canceled.delete(id)) return;
  try {
    const result = kind === "open" ? await open(question, (progress) => self.postMessage({ id, progress })) : await route(question);
    self.postMessage({ id, result });
  } catch (error) {
    self.postMessage({ id, error: plain(error, kind) });
  }
}

function plain(error, kind) {
  if (error.code && typeof error.code === "string") return { code: error.code, message: error.message };
  if (outOfMemory(error)) {
    return { code: "memory", fatal: true, message: "There is not enough memory for this image. Close other tabs, or use a smaller image, and try again." };
  }
  const what = kind === "open" ? "The model cannot be started in this browser" : "The model failed on this image";
  return { code: "work_failed", fatal: true, message: `${what} (${String(error.message ?? error).split("\n")[0]}).` };
}
