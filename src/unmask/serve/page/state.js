/* The state of the page, kept in the URL's fragment, which browsers do not send to the server. What is too long for a
   URL is kept in the browser's own history only. */

import { $ } from "./common.js";

const MAX_FRAGMENT = 8000;
const kept = new Map(); // what is kept, by its name in the fragment
const wanted = new Map(); // values of lists that are not filled yet
let saveTimer = 0;

/* Keep what `read()` returns, a text; `write(text)` restores it, and `initial()` is left out. Texts that are `long` are
   left out of a URL that they do not fit into. */
export const keep = (name, { read, write, initial, long = false }) => kept.set(name, { read, write, initial, long });

export function keepField(id, long = false) {
  const field = $(id);
  const write = (value) => {
    if (field.value === value) return;
    field.value = value;
    field.dispatchEvent(new Event("change", { bubbles: true }));
  };
  keep(id, { read: () => field.value, write, initial: () => field.defaultValue, long });
}

/* A list whose first choice is the default; `choicesChanged` restores a choice that was not there yet. */
export function keepList(id) {
  const list = $(id);
  list.addEventListener("change", () => wanted.delete(id));
  keep(id, { read: () => wanted.get(id) ?? list.value, write: (value) => select(list, value), initial: () => list.options[0]?.value ?? "" });
}

function select(list, value) {
  wanted.delete(list.id);
  if (value === "") return; // the default of a list that is not filled yet
  if (![...list.options].some((option) => option.value === value)) wanted.set(list.id, value);
  else if (list.value !== value) {
    list.value = value;
    list.dispatchEvent(new Event("change", { bubbles: true }));
  }
}

export function choicesChanged(list) {
  if (wanted.has(list.id)) select(list, wanted.get(list.id));
}

function fragment(extra, names) {
  const params = new URLSearchParams();
  for (const name of names) {
    const { read, initial } = kept.get(name), value = read();
    if (value !== initial()) params.set(name, value);
  }
  for (const [name, value] of Object.entries(extra)) params.set(name, value);
  return `#${params}`;
}

/* The URL of the page's state, and whether the texts fit into it; `full` is the fragment with all of them. */
export function address(extra = {}) {
  const names = [...kept.keys()], full = fragment(extra, names), fits = full.length <= MAX_FRAGMENT;
  const short = fits ? full : fragment(extra, names.filter((name) => !kept.get(name).long));
  return { url: `${location.origin}${location.pathname}${short}`, fits, full };
}

export function saveState() {
  clearTimeout(saveTimer);
  saveTimer = 0;
  const { url, fits, full } = address();
  const beyondUrl = fits ? null : full;
  if (url !== location.href || beyondUrl !== history.state) history.replaceState(beyondUrl, "", url);
}

/* Browsers limit how often the URL may change, so changes are collected. */
export function saveStateSoon() {
  if (!saveTimer) saveTimer = setTimeout(saveState, 250);
}

function restore() {
  const params = new URLSearchParams((history.state ?? location.hash).slice(1));
  if (![...kept.keys()].some((name) => params.has(name))) return;
  for (const [name, { write, initial }] of kept) write(params.get(name) ?? initial());
}

export function setUpState() {
  restore();
  addEventListener("hashchange", () => { restore(); saveState(); });
  addEventListener("pagehide", saveState);
  document.addEventListener("input", saveStateSoon);
  document.addEventListener("change", saveStateSoon);
}
