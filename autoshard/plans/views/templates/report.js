
"use strict";
const search = document.getElementById("search");
const rows = [...document.querySelectorAll("[data-search]")];
const cells = [...document.querySelectorAll("[data-layout]")];

function find() {
  const wanted = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of rows) {
    const text = row.dataset.search.toLowerCase();
    const fits = wanted.every((word) => text.includes(word));
    found += fits;
    if (row.tagName !== "SUMMARY") row.classList.toggle("hidden", !fits);
    if (fits && wanted.length) {
      for (let one = row.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
    }
  }
  document.getElementById("found").textContent = wanted.length ? `${found} found` : "";
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
  for (const part of document.querySelectorAll("main > section")) part.classList.toggle("hidden", part.id !== asked.get("only"));
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
