/* What a text must be: a match of a pattern, JSON, or a text of a grammar. Patterns are one for each hole. */

import { $, make } from "./common.js";
import { UserError } from "./api.js";
import { labelled, makeSelect } from "./form.js";
import { keep, keepField, keepList, saveStateSoon } from "./state.js";

const KINDS = [
  ["any", "any text"],
  ["pattern", "a match of a pattern"],
  ["json", "JSON"],
  ["schema", "JSON of a schema"],
  ["grammar", "a text of a grammar"],
];
const TEXTS = {
  schema: { label: "The JSON schema", param: "response_format", placeholder: '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}' },
  grammar: { label: "The grammar (GBNF, from root on)", param: "grammar", placeholder: 'root ::= ("yes" | "no") "."' },
};
const MAX_SHOWN = 64; // further holes have no field for a pattern

/* The controls of one form; `subject` is what must match, as in “The answer must be”. */
export class Constraint {
  constructor(prefix, subject) {
    Object.assign(this, { prefix, subject });
    this.patterns = [];
    this.holes = [];
    const place = $(`${prefix}constraint`);
    place.append(labelled(makeSelect(KINDS), `${subject} must be`, { id: `${prefix}must`, param: "response_format", title: "What may be written at all" }));
    this.fields = make("div", "patterns");
    place.append(this.fields);
    for (const [name, { label, param, placeholder }] of Object.entries(TEXTS)) {
      const field = Object.assign(make("textarea", "small"), { rows: 4, spellcheck: false, placeholder });
      place.append(labelled(field, label, { id: prefix + name, param, className: "whole" }));
      keepField(field.id, true);
    }
    keepList(`${prefix}must`);
    keep(`${prefix}patterns`, {
      read: () => JSON.stringify(this.patterns),
      write: (value) => { this.patterns = parsePatterns(value); this.#showPatterns(); },
      initial: () => "[]",
    });
    $(`${prefix}must`).addEventListener("change", () => this.#show());
    this.#show();
  }

  get kind() { return $(`${this.prefix}must`).value; }

  /* The holes that patterns are for, as they are written in the text. */
  showHoles(holes) {
    if (String(holes) === String(this.holes)) return;
    this.holes = holes;
    this.#showPatterns();
  }

  /* Say what it does, among what the options do. */
  describe() {
    const text = "Nothing else can be written then, whatever the sampler. A pattern is a regular expression, as [0-9]{4}. What is too short for it is refused.";
    $(`${this.prefix}help`).querySelector("dl").append(make("dt", "", `${this.subject} must be`), make("dd", "", text));
  }

  #show() {
    for (const name of Object.keys(TEXTS)) $(this.prefix + name).closest("label").hidden = this.kind !== name;
    this.#showPatterns();
  }

  #showPatterns() {
    this.fields.hidden = this.kind !== "pattern";
    if (this.fields.hidden) return;
    const labels = this.holes.slice(0, MAX_SHOWN).map((hole, index) => {
      const field = Object.assign(make("input"), { type: "text", spellcheck: false, maxLength: 200, placeholder: "any text", value: this.patterns[index] ?? "" });
      field.addEventListener("input", () => {
        for (let before = this.patterns.length; before < index; before += 1) this.patterns[before] = "";
        this.patterns[index] = field.value;
        while (this.patterns.at(-1) === "") this.patterns.pop();
        saveStateSoon();
      });
      const text = this.holes.length > 1 ? `Pattern of hole ${index + 1}, ${hole}` : "Pattern";
      return labelled(field, text, { id: `${this.prefix}pattern-${index}`, param: `regex[${index}]`, title: "A regular expression, as [0-9]{4}" });
    });
    this.fields.replaceChildren(...(labels.length ? labels : [make("p", "soft", "There is no hole yet.")]));
  }

  /* The field of a request. */
  read() {
    const { kind } = this;
    if (kind === "json") return { response_format: { type: "json_object" } };
    if (kind === "pattern") {
      const regex = this.holes.map((_, index) => this.patterns[index] || null);
      if (regex.some(Boolean)) return { regex };
      throw new UserError("There is no pattern yet: type one, as [0-9]{4}.", { param: this.holes.length ? "regex[0]" : undefined });
    }
    if (!(kind in TEXTS)) return {};
    const field = $(this.prefix + kind);
    if (!field.value.trim()) throw new UserError(`There is no ${kind} yet: type one, or let it be any text.`, { field });
    return kind === "grammar" ? { grammar: field.value } : { response_format: { type: "json_schema", json_schema: { schema: parseSchema(field) } } };
  }
}

function parseSchema(field) {
  try {
    return JSON.parse(field.value);
  } catch (error) {
    throw new UserError(`The schema is not JSON: ${error.message}.`, { field });
  }
}

function parsePatterns(value) {
  try {
    return JSON.parse(value).map(String);
  } catch {
    return []; // of a link that is damaged
  }
}

/* Whether a request says what its holes must be. */
export const isConstrained = (body) => ["regex", "response_format", "grammar"].some((name) => name in body);
