// Many questions in one call, whose answers stream side by side.

import { choices, element } from "./api.js";

const CAPITALS = [["France", "Paris"], ["Italy", "Rome"], ["Greece", "Athens"], ["Japan", "Tokyo"], ["Spain", "Madrid"],
  ["Norway", "Oslo"], ["Poland", "Warsaw"], ["Egypt", "Cairo"]];
const DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const OPEN = ["Define Python.", "What is meant by quantization?", "What can you do?"];
const MAX_QUESTIONS = 256;

// Questions that the demo model was made for: short ones and long ones, most with an answer that can be checked.
export function question(place) {
  const a = 7 + (place * 13) % 41, b = 3 + (place * 29) % 53;
  switch (place % 6) {
    case 0: return `What is ${a} + ${b}?`;
    case 1: return `List the numbers from ${a} to ${a + 7}.`;
    case 2: return `Capital of ${CAPITALS[(place * 5) % 8][0]}?`;
    case 3: return OPEN[(place >> 1) % 3];
    case 4: return `What is ${a + b} - ${b}?`;
    default: return `Which day comes before ${DAYS[(place * 3 + 1) % 7]}?`;
  }
}

// The answer that a question has, if it is one of the above that can be checked.
export function answerTo(text) {
  let found = /^What is (\d+) ([+-]) (\d+)\?$/.exec(text);
  if (found) {
    const [, a, sign, b] = found;
    return `${a} ${sign} ${b} = ${sign === "+" ? Number(a) + Number(b) : a - b}.`;
  }
  found = /^List the numbers from (\d+) to (\d+)\.$/.exec(text);
  if (found && found[2] - found[1] < 50) {
    return `${Array.from({ length: found[2] - found[1] + 1 }, (_, i) => Number(found[1]) + i).join(", ")}.`;
  }
  found = /^Capital of (\w+)\?$/.exec(text);
  const capital = found && CAPITALS.find(([country]) => country === found[1])?.[1];
  if (capital) return `The capital of ${found[1]} is ${capital}.`;
  found = /^Which day comes before (\w+)\?$/.exec(text);
  const day = found ? DAYS.indexOf(found[1]) : -1;
  return day < 0 ? null : `The day before ${found[1]} is ${DAYS[(day + 6) % 7]}.`;
}

const essence = (text) => text.toLowerCase().split(/\s+/).filter(Boolean).join(" ").replace(/\.$/, "");

export function startMany(model, isShown) {
  const byId = (id) => document.getElementById(id);
  const form = byId("many"), box = byId("questions"), list = byId("answers"), status = byId("many-status");
  const ask = byId("ask-many"), stop = byId("stop-many");
  const demo = /^#demo=(\d{1,4})$/.exec(location.hash);
  const count = Math.min(MAX_QUESTIONS, demo ? Number(demo[1]) : 40);
  let running = null;

  const prompts = () => box.value.split("\n").map((line) => line.trim()).filter(Boolean).slice(0, MAX_QUESTIONS);
  const showCount = () => {
    byId("many-count").textContent = String(prompts().length);
    ask.disabled = running !== null || prompts().length === 0;
  };

  async function run() {
    const asked = prompts(), texts = asked.map(() => "");
    const items = asked.map((text) => {
      const item = element("li"), answer = element("span");
      item.append(element("q", text), answer);
      return { item, answer };
    });
    list.replaceChildren(...items.map(({ item }) => item));
    list.hidden = false;
    stop.hidden = false;
    const mine = running = new AbortController();
    showCount();
    let numEnded = 0, numRight = 0, numChecked = 0;
    const tell = (end = "") => {
      const right = numChecked ? `, ${numRight} of ${numChecked} checked ones right` : "";
      status.textContent = `${numEnded} of ${asked.length} answered${right}${end}`;
    };
    // Why not in each: the status is read aloud.
    status.textContent = `${asked.length} questions asked …`;
    let end = ".";
    try {
      const body = { model: model(), prompt: asked, temperature: 0, max_tokens: 64 };
      for await (const choice of choices("v1/completions", body, mine.signal)) {
        texts[choice.index] += choice.text;
        items[choice.index].answer.textContent = texts[choice.index];
        if (choice.finish_reason) {
          numEnded += 1;
          const expected = answerTo(asked[choice.index]);
          if (expected !== null) {
            const isRight = essence(texts[choice.index]) === essence(expected);
            numChecked += 1;
            numRight += isRight;
            items[choice.index].item.dataset.state = isRight ? "right" : "wrong";
          }
        }
      }
    } catch (error) {
      end = mine.signal.aborted ? ", then stopped." : `: ${error.message}`;
    }
    running = null;
    stop.hidden = true;
    showCount();
    tell(end);
  }

  box.value = Array.from({ length: count }, (_, place) => question(place)).join("\n");
  box.addEventListener("input", showCount);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && prompts().length) run();
  });
  stop.addEventListener("click", () => { running?.abort(); ask.focus(); });
  showCount();
  // Why after the first frame: so that the beginning is seen.
  if (demo) isShown.then(run);
}
