/* The conversation as it is shown: messages, the draft of an answer, and what can be done with the last ones. All of it
   is inserted as text. */

import { $, button, copyToClipboard, make } from "./common.js";

const MAX_MASKS = 32; // of one hole; more are counted

const HOLE = /<mask:(\d+)>/;
const NAMES = { user: "You", assistant: "Model" };

/* Show the messages; `acts` are the functions edit, again and goOn of the last ones, or null while an answer is written. */
export function showMessages(messages, acts) {
  const lastUser = messages.findLastIndex(({ role }) => role === "user");
  $("chat-log").replaceChildren(...messages.map((message, index) => {
    const isLast = index === messages.length - 1, isEdited = index === lastUser;
    const foot = make("div", "foot"), item = messageItem(message.role);
    const notes = [message.seed === undefined ? "" : `seed ${message.seed}`, message.note ?? ""].filter(Boolean).join(", ");
    if (notes) foot.append(make("span", "", notes));
    if (message.role === "assistant") {
      const copy = button("Copy", () => copyToClipboard(copy, message.content), "small");
      foot.append(copy);
    }
    if (acts && isEdited) foot.append(button("Edit", () => acts.edit(index), "small"));
    if (acts && isLast) foot.append(button(message.role === "user" ? "Answer" : "Answer again", acts.again, "small"));
    if (acts && isLast && message.isCutOff) foot.append(button("Go on", acts.goOn, "small"));
    item.append(make("div", "said", message.content));
    if (foot.children.length) item.append(foot);
    return item;
  }));
}

function messageItem(role) {
  const item = make("li", `message ${role}`);
  item.append(make("span", "hidden", `${NAMES[role]}:`));
  return item;
}

/* An answer that is being written, at the end of the log; returns what shows its next draft. A screen reader is told
   the whole answer at its end, instead of every step. */
export function showDraft() {
  const item = messageItem("assistant"), text = make("div", "said draft soft", "…");
  item.setAttribute("aria-hidden", "true");
  item.append(text);
  $("chat-log").append(item);
  return (draft) => {
    text.classList.remove("soft");
    text.replaceChildren(...draft.split(HOLE).flatMap((piece, index) => (index % 2 ? masks(Number(piece)) : [piece])));
  };
}

function masks(count) {
  const shown = Array.from({ length: Math.min(count, MAX_MASKS) }, () => make("span", "token mask"));
  return count > MAX_MASKS ? [...shown, make("span", "soft", ` and ${count - MAX_MASKS} more`)] : shown;
}

/* Put the message into a field in its place; `resend(text)` and `cancel` are called when the user is done. */
export function editMessage(index, content, resend, cancel) {
  const item = $("chat-log").children[index], field = make("textarea", "small");
  Object.assign(field, { value: content, rows: 2 });
  field.setAttribute("aria-label", "Your message, to be sent again");
  const send = () => field.value.trim() && resend(field.value);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (!isSendKey(event)) return;
    else send();
    event.preventDefault();
    event.stopPropagation(); // or the composer would send as well
  });
  const row = make("div", "row");
  row.append(button("Send again", send, "small primary"), button("Cancel", cancel, "small"));
  item.replaceChildren(field, row);
  field.focus();
}

const hasKeyboard = matchMedia("(pointer: fine)");

/* The focus goes back to the composer, but for a phone, which would show its keyboard. */
export function focusComposer() {
  if (hasKeyboard.matches) $("chat-text").focus();
}

/* Enter sends where there is a keyboard with a Shift key to hold, and Control Enter everywhere. */
export const isSendKey = (event) => event.key === "Enter" && !event.isComposing && !event.shiftKey
  && (hasKeyboard.matches || event.ctrlKey || event.metaKey);

/* The whole conversation as a text. */
export const transcript = (messages) => messages.map(({ role, content }) => `${NAMES[role]}: ${content}`).join("\n\n");
