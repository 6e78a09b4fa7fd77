/* What all parts of the page share: elements, small words, where things are on the screen. */

export const $ = (id) => document.getElementById(id);

export function make(name, kind = "", text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text) element.textContent = text;
  return element;
}

export function button(text, pressed, kind = "") {
  const element = make("button", kind, text);
  element.type = "button";
  element.addEventListener("click", pressed);
  return element;
}

export function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

export function problem(form, text) {
  $(`${form}-error`).textContent = text;
  $(`${form}-error`).hidden = !text;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export async function copied(button, text, told = "Copied") {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = told;
  } catch {
    button.textContent = "The browser does not allow it";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

export const visible = (text) => (/^\ufffd*$/.test(text) ? "(part of a character)"
  : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

/* As if it had been typed: only then can the browser take it back with Ctrl+Z. */
export function typed(field, start, end, text) {
  field.focus();
  field.setSelectionRange(start, end);
  if (document.execCommand("insertText", false, text)) return;
  field.setRangeText(text, start, end, "end");
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/* Scroll to what has appeared, unless a good part of it can be seen already. */
export function bringIntoView(element) {
  const box = element.getBoundingClientRect();
  const seen = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  if (seen >= Math.min(box.height, innerHeight / 2)) return;
  element.scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
}
