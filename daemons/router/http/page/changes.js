// What has changed between two answers of /mesh, in words, with the time that an outage took.

import { duration } from "./dom.js";

const MAX_ENTRIES = 60;
const GROUPS = {
  serving: ["good", "serves"],
  connecting: ["bad", "is away; its requests wait"],
  adopting: ["fair", "is claimed; its KV is being read"],
  standby: ["fair", "is another scheduler's"],
};

export class Changes {
  entries = [];
  #before = null;
  #number = 0;
  #lostAt = new Map();

  routerLost() {
    if (!this.#lostAt.has("router")) this.#say("bad", "The router is away", "router", "lost");
  }

  take(mesh) {
    if (this.#lostAt.has("router")) this.#say("good", "The router is back", "router", "back");
    const before = this.#before;
    this.#before = mesh;
    if (!before) return;
    mesh.schedulers.forEach((now, i) => this.#scheduler(before.schedulers[i], now, i + 1));
    mesh.detokenizers.forEach((now, i) => this.#peer(before.detokenizers[i], now, `Detokenizer ${i + 1}`));
    const resumed = mesh.router.resumed_total - before.router.resumed_total;
    if (resumed > 0) this.#say("fair", `${resumed} outputs were submitted again`);
  }

  #scheduler(before, now, number) {
    if (!before) return this.#say("good", `Scheduler ${number} was added`);
    this.#peer(before, now, `Scheduler ${number}`);
    if (now.is_draining && !before.is_draining) this.#say("fair", `Scheduler ${number} drains`);
    const name = `Worker group ${number}`;
    if (now.group !== before.group && GROUPS[now.group]) {
      const [kind, words] = GROUPS[now.group];
      this.#say(kind, `${name} ${words}`, name, kind === "bad" ? "lost" : kind === "good" ? "back" : "");
    }
    if (now.epoch !== before.epoch && now.epoch) this.#say("fair", `${name}: epoch ${before.epoch} → ${now.epoch}`);
  }

  #peer(before, now, name) {
    if (!before) return this.#say("good", `${name} was added`);
    if (before.is_connected && !now.is_connected) this.#say("bad", `${name} is away`, name, "lost");
    else if (!before.is_connected && now.is_connected) this.#say("good", `${name} is connected`, name, "back");
    else if (now.num_connects > before.num_connects) this.#say("fair", `${name} was lost and is back`);
  }

  #say(kind, text, name = "", change = "") {
    if (change === "lost") this.#lostAt.set(name, performance.now());
    if (change === "back" && this.#lostAt.has(name)) {
      text += ` again, after ${duration((performance.now() - this.#lostAt.get(name)) / 1000)}`;
      this.#lostAt.delete(name);
    }
    const time = new Date().toLocaleTimeString([], { hour12: false });
    this.entries.unshift({ kind, text, time, number: this.#number++ });
    this.entries.length = Math.min(this.entries.length, MAX_ENTRIES);
  }
}
