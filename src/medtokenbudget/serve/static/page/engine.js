// The engine in this page: the model runs in a web worker, and no image leaves the device.

import { ApiError } from "../api.js";

const ROOT = new URL(".", document.baseURI).href;
const files = new Map(); // samples, so that they need no second request
const waiting = new Map(); // questions to the worker
let site = null;
let worker = null;
let number = 0;

// A module that uses a vector instruction: a browser without SIMD rejects it.
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

export async function open(onProgress) {
  if (typeof WebAssembly !== "object" || !WebAssembly.validate(new Uint8Array(SIMD))) {
    throw new ApiError(0, "no_wasm", "This browser cannot run the model: WebAssembly with SIMD is missing or switched off. Use a current Firefox, Chrome, Edge or Safari.");
  }
  site = await (await get("site.json")).json();
  await start(onProgress);
  registerServiceWorker();
}

async function get(path) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT));
  } catch {
    throw new ApiError(0, "unreachable", `${path} cannot be downloaded. Check the connection, then reload the page.`);
  }
  if (!response.ok) throw new ApiError(response.status, "unreachable", `${path} cannot be downloaded (status ${response.status}). The site is not complete: export it again.`);
  return response;
}

async function start(onProgress) {
  // A worker from a blob inherits the content security policy of this page; one from an address would have none of its own.
  const script = URL.createObjectURL(new Blob([`import ${JSON.stringify(new URL("worker.js", import.meta.url).href)};`], { type: "text/javascript" }));
  worker = new Worker(script, { type: "module" });
  worker.addEventListener("message", ({ data }) => receive(data));
  worker.addEventListener("error", (event) => stop(new ApiError(0, "worker", `The model stopped (${event.message || "its script cannot be loaded"}). Try again, or reload the page.`)));
  try {
    await ask({ kind: "open", description: site, root: ROOT }, undefined, onProgress);
  } catch (error) {
    stop(error);
    throw error;
  } finally {
    URL.revokeObjectURL(script);
  }
}

/** End the worker, for example when its memory is used up; the next question starts another one. */
function stop(error) {
  worker?.terminate();
  worker = null;
  for (const { reject } of waiting.values()) reject(error);
  waiting.clear();
}

function receive({ id, progress, result, error }) {
  const question = waiting.get(id);
  if (!question) return;
  if (progress) {
    question.onProgress?.(progress);
    return;
  }
  waiting.delete(id);
  if (!error) {
    question.resolve(result);
    return;
  }
  const failure = new ApiError(0, error.code, error.message);
  question.reject(failure);
  if (error.fatal) stop(failure);
}

function ask(message, signal, onProgress) {
  number += 1;
  const id = number;
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject, onProgress });
    signal?.addEventListener("abort", () => {
      if (!waiting.delete(id)) return;
      worker?.postMessage({ id, kind: "cancel" });
      reject(new DOMException("Another image was chosen.", "AbortError"));
    });
    worker.postMessage({ id, ...message });
  });
}

export const model = async () => site.model;
export const samples = async () => ({ samples: site.samples });
export const setToken = () => {};

/** An image brings its mask along, so that nothing is requested any more when all samples are shown. */
export async function sampleFile(id, what) {
  const sample = site.samples.find((row) => row.id === id);
  for (const path of [sample.image, sample.mask]) if (!files.has(path)) files.set(path, await (await get(path)).blob());
  return files.get(sample[what]);
}

export async function route(image, mask, budgets, signal) {
  if (!worker) await start();
  const answer = await ask({ kind: "route", image, mask, budgets }, signal);
  return { ...answer, image: { ...answer.image, preview: URL.createObjectURL(answer.image.preview) } };
}

/** Offline from the next visit on. Registered when the model is loaded, so that nothing is downloaded twice. */
async function registerServiceWorker() {
  try {
    await navigator.serviceWorker.register(new URL("service-worker.js", ROOT));
  } catch {
    // Not over https, or switched off: the page works, but not offline.
  }
}
