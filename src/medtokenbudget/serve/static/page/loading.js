// The large files of the site, with progress: from the cache of this browser if it has one, else from the server. Each is compared
// with its size and hash in site.json, so that a damaged file is a message and not a wrong answer.

/** The files that the model needs, as {path: Uint8Array}. `report({done, total})` is called while bytes arrive. */
export async function load(site, root, report) {
  const paths = [...Object.values(site.graphs.files), site.runtime.binary];
  const total = paths.reduce((sum, path) => sum + site.files[path].bytes, 0);
  const done = {};
  const files = {};
  for (const path of paths) {
    files[path] = await file(site, root, path, (bytes) => {
      done[path] = bytes;
      report({ done: Object.values(done).reduce((sum, value) => sum + value, 0), total });
    });
  }
  return files;
}

async function file(site, root, path, report) {
  const address = new URL(path, root).href;
  const cache = await openCache(`mtb ${new URL(root).pathname} ${site.version}`);
  const kept = await cache?.match(address);
  const response = kept ?? (await download(address, path));
  const bytes = await read(response, site.files[path].bytes, report);
  const fault = await damage(bytes, site.files[path]);
  if (fault) {
    await cache?.delete(address);
    throw failure("damaged_model", `${path} ${fault}. Reload the page to download it again. If that does not help, the site must be exported again.`);
  }
  if (!kept) await cache?.put(address, new Response(bytes)).catch(() => {});
  return bytes;
}

/** The cache of this version of the site, which the service worker reads too; null where the browser has none (a page without https) or refuses it. */
async function openCache(name) {
  try {
    return await caches.open(name);
  } catch {
    return null;
  }
}

async function download(address, path) {
  let response;
  try {
    response = await fetch(address);
  } catch {
    throw failure("unreachable", `${path} cannot be downloaded. Check the connection, then reload the page.`);
  }
  if (!response.ok) throw failure("unreachable", `${path} cannot be downloaded (status ${response.status}). The site is not complete: export it again.`);
  return response;
}

async function read(response, expected, report) {
  const chunks = [];
  let length = 0;
  const reader = response.body.getReader();
  for (let step = await reader.read(); !step.done; step = await reader.read()) {
    chunks.push(step.value);
    length += step.value.length;
    report(Math.min(length, expected));
  }
  const bytes = new Uint8Array(length);
  let at = 0;
  for (const chunk of chunks) {
    bytes.set(chunk, at);
    at += chunk.length;
  }
  return bytes;
}

async function damage(bytes, expected) {
  if (bytes.length !== expected.bytes) return `has ${bytes.length} bytes instead of ${expected.bytes}`;
  if (!globalThis.crypto?.subtle) return null; // not on a page without https
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  const hex = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex === expected.sha256 ? null : "is damaged (its hash is not that of the exported file)";
}

function failure(code, message) {
  return Object.assign(new Error(message), { code });
}
