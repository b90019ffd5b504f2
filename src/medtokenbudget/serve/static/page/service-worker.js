// Keeps the files of this version of the site in the browser's cache, so that the page works offline, and lets no request go elsewhere.
// `mtb export` puts it at the root of the site, after a line that defines SITE = {version, files}.

/* global SITE */
const root = new URL(".", self.location.href).href;
// Other sites of the same origin have caches of their own.
const PREFIX = `mtb ${new URL(root).pathname} `;
const CACHE = PREFIX + SITE.version;

self.addEventListener("install", (event) => {
  event.waitUntil(fill());
  self.skipWaiting();
});

async function fill() {
  const cache = await caches.open(CACHE);
  for (const path of SITE.files) {
    const address = new URL(path, root).href;
    if (!(await cache.match(address))) await cache.add(new Request(address, { cache: "no-cache" }));
  }
}

self.addEventListener("activate", (event) => {
  event.waitUntil(tidy());
});

async function tidy() {
  const old = (await caches.keys()).filter((name) => name.startsWith(PREFIX) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await self.clients.claim();
}

self.addEventListener("fetch", (event) => {
  const { url } = event.request;
  if (new URL(url).origin !== self.location.origin) event.respondWith(Response.error());
  else if (url.startsWith(root)) event.respondWith(answer(event.request));
});

async function answer(request) {
  const address = new URL(request.url);
  if (address.pathname === new URL(root).pathname) address.pathname += "index.html";
  const kept = await (await caches.open(CACHE)).match(address.href, { ignoreSearch: true });
  return kept ?? fetch(request);
}
