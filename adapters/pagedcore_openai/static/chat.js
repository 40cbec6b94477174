// The chat: a conversation in memory, each answer as it streams.

import { choices, element } from "./api.js";

export function startChat(model) {
  const byId = (id) => document.getElementById(id);
  const form = byId("chat"), log = byId("log"), message = byId("message");
  const send = byId("send"), stop = byId("stop");
  let messages = [], running = null;

  function addTurn(role, text) {
    const turn = element("article", "", { class: `turn ${role}` });
    const paragraph = element("p", text);
    turn.append(element("h3", role === "user" ? "You" : model()), paragraph);
    log.append(turn);
    log.scrollTop = log.scrollHeight;
    return paragraph;
  }

  async function ask(text) {
    messages.push({ role: "user", content: text });
    addTurn("user", text);
    const paragraph = addTurn("assistant", "");
    const mine = running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    // Why: a reader of the screen hears the answer once, when it is whole.
    log.setAttribute("aria-busy", "true");
    try {
      const body = { model: model(), messages, temperature: 0 };
      for await (const choice of choices("v1/chat/completions", body, mine.signal)) {
        paragraph.textContent += choice.delta.content ?? "";
        log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (!mine.signal.aborted) {
        paragraph.parentElement.append(element("p", error.message, { class: "error" }));
        if (!paragraph.textContent) messages.pop();
      }
    } finally {
      if (paragraph.textContent) messages.push({ role: "assistant", content: paragraph.textContent });
      if (running === mine) {
        running = null;
        send.disabled = false;
        stop.hidden = true;
        log.removeAttribute("aria-busy");
      }
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || running) return;
    message.value = "";
    ask(text);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => { running?.abort(); message.focus(); });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    message.focus();
  });
}
