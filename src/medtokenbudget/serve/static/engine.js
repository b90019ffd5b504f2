// The engine that answers for the page: the service (HTTP requests) or the page itself (the model in a web worker).
//
// Both have the same functions:
//   open(onProgress)                        get ready; onProgress({done, total, text}) while a model is being loaded, in bytes
//   model(), samples()                      what there is
//   sampleFile(id, "image" | "mask")        a Blob
//   route(image, mask, budgets, signal)     every method at every budget, for one image
//   setToken(token)                         only the service ever asks for one
// Errors have a `code` and a `message` for the person who reads it.

const kind = document.querySelector('meta[name="mtb-engine"]').content;

export const inPage = kind === "page";
export const engine = inPage ? await import("./page/engine.js") : await import("./api.js");
