// Filters for the ledger on the front page: by verdict and by chapter. Without this script the whole table is shown.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.ledger");
  if (!table) return;
  const rows = [...table.querySelectorAll("tbody tr")];
  const chosen = { verdict: "", chapter: "" };

  const apply = () => {
    for (const row of rows) {
      row.hidden = Object.entries(chosen).some(([key, value]) => value && row.dataset[key] !== value);
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} shown`;
  };

  const bar = document.createElement("div");
  bar.className = "ledger-filter";
  const verdicts = [...new Set(rows.map((row) => row.dataset.verdict))];
  const buttons = ["", ...verdicts].map((verdict) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = verdict || "all";
    button.setAttribute("aria-pressed", String(verdict === ""));
    button.addEventListener("click", () => {
      chosen.verdict = verdict;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      apply();
    });
    return button;
  });
  const select = document.createElement("select");
  select.setAttribute("aria-label", "chapter");
  for (const chapter of ["", ...new Set(rows.map((row) => row.dataset.chapter))]) {
    select.add(new Option(chapter ? `chapter ${chapter}` : "every chapter", chapter));
  }
  select.addEventListener("change", () => {
    chosen.chapter = select.value;
    apply();
  });
  const shown = document.createElement("span");
  shown.setAttribute("role", "status");
  bar.append(...buttons, select, shown);
  table.before(bar);
  apply();
});
