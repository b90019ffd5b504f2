// The engine that asks the service: all requests to it.

const TOKEN = "mtb-token";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Move a token from the address (#token=...) into the storage of this tab. */
function takeTokenFromAddress() {
  const match = /^#token=(.+)$/.exec(location.hash);
  if (!match) return;
  setToken(decodeURIComponent(match[1]));
  history.replaceState(null, "", location.pathname);
}

let held = null;

export function setToken(token) {
  held = token;
  try {
    sessionStorage.setItem(TOKEN, token);
  } catch {
    // Storage is disabled: the token lasts until the page is closed.
  }
}

function token() {
  try {
    return held ?? sessionStorage.getItem(TOKEN);
  } catch {
    return held;
  }
}

export const open = async () => takeTokenFromAddress();

async function ask(path, options = {}) {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not respond. Check that it is still running, then try again.");
  }
  if (response.ok) return response;
  let detail = { code: "error", message: `The server responded with status ${response.status}.` };
  try {
    detail = (await response.json()).error ?? detail;
  } catch {
    // Not JSON, for example from a proxy: the status is all there is.
  }
  throw new ApiError(response.status, detail.code, detail.message);
}

export const model = async () => (await ask("/v1/model")).json();
export const samples = async () => (await ask("/v1/samples")).json();
export const sampleFile = async (id, what) => (await ask(`/v1/samples/${encodeURIComponent(id)}/${what}`)).blob();

/** Analyze one image. Retries a few times while the queue of the server is full. */
export async function route(image, mask, budgets, signal) {
  for (let attempt = 0; ; attempt += 1) {
    const form = new FormData();
    form.append("image", image, "image");
    if (mask) form.append("mask", mask, "mask");
    form.append("budgets", budgets.join(","));
    form.append("preview", "true");
    try {
      return await (await ask("/v1/route", { method: "POST", body: form, signal })).json();
    } catch (error) {
      if (error.code !== "queue_full" || attempt === 4) throw error;
      await new Promise((done) => setTimeout(done, 1000 * (attempt + 1)));
    }
  }
}
