
"use strict";
const search = document.getElementById("search");
const rows = [...document.querySelectorAll("[data-search]")];
const cells = [...document.querySelectorAll("[data-layout]")];
const parts = [...document.querySelectorAll("main > section, main [data-group], main table, main ol.moves")];

function find() {
  const wanted = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  const fitting = new Set();
  for (const row of rows) {
    const text = row.dataset.search.toLowerCase();
    const fits = wanted.every((word) => text.includes(word));
    found += fits;
    if (row.tagName !== "SUMMARY") row.classList.toggle("hidden", !fits);
    if (!fits || !wanted.length) continue;
    for (let one = row.parentElement; one; one = one.parentElement) {
      fitting.add(one);
      if (one.tagName === "DETAILS") one.open = true;
    }
  }
  // While something is looked for, what has none of it goes: sections, tables, modules; and sums, which would be of more.
  for (const part of parts) part.classList.toggle("hidden", wanted.length > 0 && !fitting.has(part));
  document.body.classList.toggle("searching", wanted.length > 0);
  document.getElementById("found").textContent = !wanted.length ? "" : found ? `${found} found` : "nothing found";
}

function mark(layout) {
  for (const cell of cells) cell.classList.toggle("same", cell.dataset.layout === layout);
}

search.addEventListener("input", find);
document.addEventListener("mouseover", (event) => mark(event.target.closest("[data-layout]")?.dataset.layout));

// A link may ask: report.html#only=map&search=wq&layout=tp:S(0)
const asked = new URLSearchParams(location.hash.slice(1));
if (asked.has("search")) {
  search.value = asked.get("search");
  find();
}
if (asked.has("only")) {
  const others = document.querySelectorAll(`header, .tools, main > section:not(#${CSS.escape(asked.get("only"))})`);
  for (const part of others) part.classList.add("hidden");
}
if (asked.has("layout")) mark(asked.get("layout"));

let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
window.addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});
