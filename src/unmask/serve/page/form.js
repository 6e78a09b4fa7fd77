/* What all forms share: controls that name the field of the request that they are for, and errors beside them. */

import { $, make } from "./common.js";
import { UserError } from "./api.js";

const alerts = new Map(); // the errors of forms, and where they stand if they are no control's
const marked = new Map(); // the controls at fault, and what describes them otherwise

/* A control with its label; `param` is the field of the request that it is for, by which refusals find it. */
export function labelled(control, text, { id, param, title = "", className = "" }) {
  Object.assign(control, { id });
  control.dataset.param = param;
  const label = make("label", className, `${text} `);
  label.title = title;
  label.append(control);
  return label;
}

export function makeSelect(choices) {
  const select = make("select");
  setChoices(select, choices);
  return select;
}

/* The choices of a list: their values and what is shown for each; the chosen one stays if it is still there. */
export function setChoices(select, choices) {
  const chosen = select.value;
  select.replaceChildren(...choices.map(([value, text]) => Object.assign(make("option", "", text), { value })));
  if (choices.some(([value]) => value === chosen)) select.value = chosen;
}

/* The control of a field of the request; of several, the last one that is shown. */
function controlOf(form, param) {
  const shown = [...form.querySelectorAll("[data-param]")].filter((field) => !field.closest("[hidden]"));
  return shown.findLast((field) => [param, param.replace(/[.[].*/, "")].includes(field.dataset.param));
}

/* Mark a control as the one at fault, until something is typed into it. */
function mark(field, alert) {
  for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  field.setAttribute("aria-invalid", "true");
  marked.set(field, field.getAttribute("aria-describedby") ?? "");
  field.setAttribute("aria-describedby", `${alert.id} ${marked.get(field)}`.trim());
  (field.closest("label") ?? field).after(alert);
  field.addEventListener("input", () => unmark(field), { once: true });
  field.focus();
}

function unmark(field) {
  if (!marked.has(field)) return;
  field.removeAttribute("aria-invalid");
  field.setAttribute("aria-describedby", marked.get(field));
  marked.delete(field);
}

/* Tell an error in the form `name`, beside the control that it is about; without an error, none is told. */
export function showError(name, error = null) {
  if (!alerts.has(name)) alerts.set(name, { alert: $(`${name}-error`), home: $(`${name}-error`).parentElement });
  const { alert, home } = alerts.get(name), form = $(`${name}-form`);
  for (const field of [...marked.keys()].filter((each) => form.contains(each))) unmark(field);
  home.append(alert);
  const field = error?.field ?? (error?.param && controlOf(form, error.param));
  if (field) mark(field, alert);
  alert.textContent = error?.message ?? "";
  alert.hidden = !error;
}

/* The number in a field; undefined if the field is optional and empty, or has no effect. */
export function readNumber(field) {
  const { disabled, validity, value, labels, min, max } = field;
  if (disabled || (value === "" && !validity.badInput && !field.required)) return undefined;
  const isInteger = !field.hasAttribute("step");
  const invalid = validity.badInput || validity.valueMissing || validity.rangeUnderflow || validity.rangeOverflow;
  if (invalid || (isInteger && !Number.isInteger(Number(value)))) {
    const name = labels[0].textContent.trim(), kind = isInteger ? "a whole number" : "a number";
    throw new UserError(`${name} must be ${kind} ${max === "" ? `of at least ${min}` : `from ${min} to ${max}`}.`, { field });
  }
  return Number(value);
}
