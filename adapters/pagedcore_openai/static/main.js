// Puts the page together: the key, the models, and its three parts.

import { call, key } from "./api.js";
import { startChat } from "./chat.js";
import { startLive } from "./live.js";
import { startMany } from "./many.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("key-dialog");
let asking = null;

key.onAsk((reason) => {
  asking ??= new Promise((resolve) => {
    byId("key-error").textContent = reason;
    byId("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => { asking = null; resolve(); }, { once: true });
  });
  return asking;
});
// Why: without a key there is nothing to go back to.
dialog.addEventListener("cancel", (event) => { if (!key.get()) event.preventDefault(); });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  dialog.close();
});
byId("change-key").addEventListener("click", async () => {
  await key.ask("");
  // Why: nothing of another tenant's stays on the page.
  location.reload();
});

async function start() {
  const models = (await (await call("v1/models")).json()).data;
  const select = byId("model");
  for (const one of models) select.add(new Option(one.id, one.id));
  byId("change-key").hidden = !key.get();
  document.title = `pagedcore: ${models[0].id}`;
  const model = () => select.value;
  const live = startLive(model);
  select.addEventListener("change", live.restart);
  startChat(model);
  startMany(model, live.isShown);
}

start().catch((error) => {
  byId("connection").dataset.state = "bad";
  byId("connection").textContent = error.message;
});
