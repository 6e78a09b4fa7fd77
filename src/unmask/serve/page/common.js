/* What all parts of the page share: the server, elements, small words. */

export const $ = (id) => document.getElementById(id);

export async function ask(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  };
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await sentence(answer));
  return answer;
}

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/* Server-sent events of a POST, which EventSource cannot do. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const event = {};
      for (const line of rest.slice(0, end).split("\n")) {
        const colon = line.indexOf(": ");
        event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      rest = rest.slice(end + 2);
      yield { name: event.event, data: JSON.parse(event.data) };
    }
  }
}

export function make(name, kind = "", text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text) element.textContent = text;
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

export async function copied(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

export function busy(form, on) {
  $(form === "write" ? "go" : "score-go").disabled = on;
  if (form === "write") $("stop").hidden = !on;
}

export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(part of a character)";
