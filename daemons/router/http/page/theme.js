// Light or dark: the system's choice until the button is pressed.

import { $ } from "./dom.js";

const STORED = "radixmesh.theme";

export function setUpTheme() {
  const stored = localStorage.getItem(STORED);
  if (stored) document.documentElement.dataset.theme = stored;
  $("theme-button").addEventListener("click", () => {
    const isDark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(STORED, theme);
  });
}
