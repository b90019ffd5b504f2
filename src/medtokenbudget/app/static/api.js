// Talks to the service. Its own file because here alone requests are made, and all of them before the slider moves.

const TOKEN = "mtb-token";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** A token behind the # of the address moves into this tab's storage, out of sight. */
export function takeTokenFromAddress() {
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
    // Storage is switched off: the token lives as long as the page.
  }
}

function token() {
  try {
    return held ?? sessionStorage.getItem(TOKEN);
  } catch {
    return held;
  }
}

async function ask(path, options = {}) {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  let fault = { code: "error", message: `The server answered ${response.status}.` };
  try {
    fault = (await response.json()).error ?? fault;
  } catch {
    // Not from our service: a proxy in between. The status has to do.
  }
  throw new ApiError(response.status, fault.code, fault.message);
}

export const model = async () => (await ask("/v1/model")).json();
export const samples = async () => (await ask("/v1/samples")).json();
export const sampleFile = async (id, what) => (await ask(`/v1/samples/${encodeURIComponent(id)}/${what}`)).blob();

/** One pass over an image; a full queue is tried again a few times, as the server asks. */
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
