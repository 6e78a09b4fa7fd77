/* The state of the page, kept in the URL's fragment, which browsers do not send to the server. */

import { $ } from "./common.js";

const FIELDS = ["text", "length", "n", "steps", "temperature", "top-p", "seed", "sampler", "score-text", "draws"];
const TEXTS = ["text", "score-text"];
const MAX_FRAGMENT = 8000;
const CHOICES = { mode: "[name=mode]", tab: "[role=tab]" };

const defaultOf = (id) => (id === "sampler" ? "default" : $(id).defaultValue);
const current = {
  mode: () => document.querySelector("[name=mode]:checked").value,
  tab: () => document.querySelector("[role=tab][aria-selected=true]").getAttribute("aria-controls"),
};
let saveTimer = 0, sampler = "";

function fragment(extra, ids) {
  const params = new URLSearchParams();
  if (current.tab() !== "write") params.set("tab", current.tab());
  if (current.mode() !== "fill") params.set("mode", current.mode());
  for (const id of ids) if ($(id).value !== defaultOf(id)) params.set(id, $(id).value);
  for (const [id, value] of Object.entries(extra)) params.set(id, value);
  return `#${params}`;
}

/* The URL of the page's state, and whether the texts fit into it. */
export function address(extra = {}) {
  const full = fragment(extra, FIELDS), fits = full.length <= MAX_FRAGMENT;
  const short = fits ? full : fragment(extra, FIELDS.filter((id) => !TEXTS.includes(id)));
  return { url: `${location.origin}${location.pathname}${short}`, fits };
}

export function saveState() {
  clearTimeout(saveTimer);
  saveTimer = 0;
  const { url } = address();
  if (url !== location.href) history.replaceState(null, "", url);
}

/* Browsers limit how often the URL may change, so changes are collected. */
export function saveStateSoon() {
  if (!saveTimer) saveTimer = setTimeout(saveState, 250);
}

function restore() {
  const params = new URLSearchParams(location.hash.slice(1));
  const known = [...FIELDS, ...Object.keys(CHOICES)].some((id) => params.has(id));
  if (!known) return;
  for (const id of FIELDS) {
    const value = params.get(id) ?? defaultOf(id);
    if (id !== "sampler" && $(id).value !== value) $(id).value = value;
  }
  sampler = params.get("sampler") ?? "default";
  restoreSampler();
  for (const [name, all] of Object.entries(CHOICES)) {
    const selected = params.get(name) ?? { mode: "fill", tab: "write" }[name];
    const element = [...document.querySelectorAll(all)].find((each) => selected === (each.value || each.getAttribute("aria-controls")));
    if (element) element.click();
  }
}

/* The samplers are known only after /v1/models has answered. */
export function restoreSampler() {
  if (!sampler || ![...$("sampler").options].some((option) => option.value === sampler)) return;
  $("sampler").value = sampler;
  $("sampler").dispatchEvent(new Event("change", { bubbles: true }));
  sampler = "";
}

export function setUpState() {
  restore();
  addEventListener("hashchange", () => { restore(); saveState(); });
  addEventListener("pagehide", saveState);
  document.addEventListener("input", saveStateSoon);
  document.addEventListener("change", saveStateSoon);
}
