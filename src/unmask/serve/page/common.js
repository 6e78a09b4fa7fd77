/* Helpers shared by all parts of the page. */

export const $ = (id) => document.getElementById(id);

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function button(text, onClick, className = "") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

export function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const labels = new WeakMap(); // of buttons that show a confirmation now

export async function copyToClipboard(button, text, confirmation = "Copied") {
  const shown = labels.get(button) ?? { label: button.textContent };
  clearTimeout(shown.timer); // clicked again: the new confirmation has its own time
  labels.set(button, shown);
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = confirmation;
  } catch {
    button.textContent = "The browser does not allow it";
  }
  shown.timer = setTimeout(() => {
    button.textContent = shown.label;
    labels.delete(button);
  }, 1500);
}

export const visible = (text) => (/^\ufffd*$/.test(text) ? "(part of a character)"
  : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

/* Insert text like typing does, so that Ctrl+Z can undo it. */
export function insertText(field, start, end, text) {
  field.focus();
  field.setSelectionRange(start, end);
  if (document.execCommand("insertText", false, text)) return;
  field.setRangeText(text, start, end, "end");
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/* Scroll to an element, unless a good part of it is visible already. */
export function bringIntoView(element) {
  const box = element.getBoundingClientRect();
  const visibleHeight = Math.min(box.bottom, innerHeight) - Math.max(box.top, 0);
  if (visibleHeight >= Math.min(box.height, innerHeight / 2)) return;
  element.scrollIntoView({ block: "start", behavior: reducedMotion.matches ? "auto" : "smooth" });
}
