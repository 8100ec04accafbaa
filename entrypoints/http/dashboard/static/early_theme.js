// Before the first paint, so that a chosen theme does not flash in over the system's. The switch is in theme.js.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("baton-dashboard-theme");
  } catch {
    // Storage is turned off: the system's theme it is.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
