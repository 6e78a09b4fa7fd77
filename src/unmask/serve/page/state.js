/* What is on the page, kept in the fragment of its address, which no browser sends to a server. */

import { $ } from "./common.js";

const FIELDS = ["text", "length", "n", "steps", "temperature", "top-p", "seed", "sampler", "score-text", "draws"];
const TEXTS = ["text", "score-text"];
const LONGEST = 8000;
const CHOICES = { mode: "[name=mode]", tab: "[role=tab]" };

const usual = (id) => (id === "sampler" ? "default" : $(id).defaultValue);
const chosen = {
  mode: () => document.querySelector("[name=mode]:checked").value,
  tab: () => document.querySelector("[role=tab][aria-selected=true]").getAttribute("aria-controls"),
};
let waiting = 0, sampler = "";

function fragment(more, ids) {
  const kept = new URLSearchParams();
  if (chosen.tab() !== "write") kept.set("tab", chosen.tab());
  if (chosen.mode() !== "fill") kept.set("mode", chosen.mode());
  for (const id of ids) if ($(id).value !== usual(id)) kept.set(id, $(id).value);
  for (const [id, value] of Object.entries(more)) kept.set(id, value);
  return `#${kept}`;
}

/* The address of the page as it is, and whether the texts had room in it. */
export function address(more = {}) {
  const whole = fragment(more, FIELDS), fits = whole.length <= LONGEST;
  const short = fits ? whole : fragment(more, FIELDS.filter((id) => !TEXTS.includes(id)));
  return { url: `${location.origin}${location.pathname}${short}`, fits };
}

export function keep() {
  clearTimeout(waiting);
  waiting = 0;
  const { url } = address();
  if (url !== location.href) history.replaceState(null, "", url);
}

/* Browsers do not like an address that changes with every key. */
export function keepSoon() {
  if (!waiting) waiting = setTimeout(keep, 250);
}

function restore() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const known = [...FIELDS, ...Object.keys(CHOICES)].some((id) => kept.has(id));
  if (!known) return;
  for (const id of FIELDS) {
    const value = kept.get(id) ?? usual(id);
    if (id !== "sampler" && $(id).value !== value) $(id).value = value;
  }
  sampler = kept.get("sampler") ?? "default";
  restoreSampler();
  for (const [name, all] of Object.entries(CHOICES)) {
    const wanted = kept.get(name) ?? { mode: "fill", tab: "write" }[name];
    const found = [...document.querySelectorAll(all)].find((each) => wanted === (each.value || each.getAttribute("aria-controls")));
    if (found) found.click();
  }
}

/* Which samplers there are is known only once the server has answered. */
export function restoreSampler() {
  if (!sampler || ![...$("sampler").options].some((option) => option.value === sampler)) return;
  $("sampler").value = sampler;
  $("sampler").dispatchEvent(new Event("change", { bubbles: true }));
  sampler = "";
}

export function setUpState() {
  restore();
  addEventListener("hashchange", () => { restore(); keep(); });
  addEventListener("pagehide", keep);
  document.addEventListener("input", keepSoon);
  document.addEventListener("change", keepSoon);
}
