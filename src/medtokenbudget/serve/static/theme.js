// Color theme: auto, light or dark. A classic script, so a saved theme is applied before the page is painted and does not flash.
(() => {
  const KEY = "mtb-theme";
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function apply(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  }

  try {
    apply(localStorage.getItem(KEY));
  } catch {
    // Storage is disabled: use the system's theme.
  }

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const current = () => root.dataset.theme ?? "auto";
    const show = () => {
      document.getElementById("theme-name").textContent = current();
      button.dataset.shown = current();
    };
    button.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
      apply(next);
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // Storage is disabled: the choice lasts until the page is closed.
      }
      show();
    });
    show();
  });
})();
