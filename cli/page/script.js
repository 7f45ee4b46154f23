"use strict";

// Arrow keys move inside a list; Tab enters it once.
for (const list of document.querySelectorAll("[data-rove]")) {
  const items = [...list.children].map((item) => item.querySelector("a") || item);
  items.forEach((item, index) => { item.tabIndex = index ? -1 : 0; });
  list.addEventListener("focusin", (event) => {
    const now = items.find((item) => item.contains(event.target));
    if (now) items.forEach((item) => { item.tabIndex = item === now ? 0 : -1; });
  });
  list.addEventListener("keydown", (event) => {
    const at = items.indexOf(document.activeElement), last = items.length - 1;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    items[Math.min(Math.max(to, 0), last)].focus();
  });
}

// A row shows what it reads and who reads it.
for (const graph of document.querySelectorAll(".graph")) {
  const rows = [...graph.querySelectorAll("li")];
  const reads = rows.map((row) => (row.dataset.reads || "").split(" ").filter(Boolean).map(Number));
  const lines = graph.querySelectorAll("path[data-row]");
  const show = (row) => {
    const at = rows.indexOf(row);
    rows.forEach((other, index) => {
      other.classList.toggle("active", index === at);
      other.classList.toggle("source", at >= 0 && reads[at].includes(index));
      other.classList.toggle("user", at >= 0 && reads[index].includes(at));
    });
    for (const line of lines) {
      const from = Number(line.dataset.row);
      line.classList.toggle("on", at >= 0 && (from === at || reads[at].includes(from)));
    }
    if (row && !row.title) row.title = row.textContent.trim().replace(/\s+/g, " ");
  };
  const find = (event) => show(event.target.closest("li"));
  graph.addEventListener("pointerover", find);
  graph.addEventListener("focusin", find);
  graph.addEventListener("pointerleave", () => show(null));
  graph.addEventListener("focusout", () => show(null));
}

// Links to what is shown are marked.
const mark = () => {
  const panels = [...document.querySelectorAll(".panel")];
  const shown = panels.find((panel) => location.hash === "#" + panel.id) || panels[0];
  for (const link of document.querySelectorAll("a.tag, .strip a")) {
    if (shown && link.hash === "#" + shown.id) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
};
addEventListener("hashchange", mark);
mark();

// A table is a stop for Tab only where it scrolls.
const fits = new ResizeObserver((entries) => {
  for (const { target } of entries) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
});
for (const box of document.querySelectorAll(".scroll")) fits.observe(box);
