// The theme that was chosen before, applied before the first paint; app.js does the rest.
try {
  const chosen = localStorage.getItem("metrale-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; the system's preference holds then.
}
