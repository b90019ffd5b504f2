// Runs before the page is painted, so that a chosen colour scheme does not flash in. Its own file for that reason.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("mtb-theme");
  } catch {
    // Storage is switched off: the system's scheme it is.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
