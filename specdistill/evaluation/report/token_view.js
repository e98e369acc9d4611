"use strict";
// A round is [emitted tokens, how many of them were drafted, rejected draft tokens, for a tree the number of its other nodes].
const samples = JSON.parse(document.getElementById("samples").textContent);
const at = id => document.getElementById(id);
const visible = text => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
let sample, spans, round, player;

function add(parent, tag, kind, text) {
  const node = Object.assign(document.createElement(tag), { className: kind, textContent: text });
  parent.append(node);
  return node;
}

// The kind of a round's last token: the target's correction of a draft, the bonus token of one accepted whole, or a plain step.
const closing = ([, accepted, rejected]) => rejected.length ? "corrected" : accepted ? "bonus" : "plain";

function explain([emitted, accepted, rejected, others = 0]) {
  const drafted = accepted + rejected.length, ended = emitted.length === accepted;
  if (!drafted) return "nothing drafted, one plain step of the target.";
  const kept = !accepted ? "none accepted" : `${rejected.length || others ? "" : "all "}${accepted} accepted`;
  const then = ended ? "the completion ends there" : rejected.length ? "the target then corrected one" : "the target added the bonus token";
  return `${drafted + others} drafted${others ? " in a tree" : ""}, ${kept}; ${then}.`;
}

function show(index) {
  sample = samples[index];
  const { prompt, first, rounds, length, speedup } = sample;
  const tokens = rounds.reduce((sum, [emitted]) => sum + emitted.length, 1);
  at("facts").textContent = `${plural(tokens, "token")} in ${plural(rounds.length, "round")}`
    + (length === null ? "" : `, acceptance length ${length.toFixed(2)}`) + (speedup === null ? "" : `, ${speedup.toFixed(2)}×`);
  at("sample").value = index;
  at("text").replaceChildren();
  add(at("text"), "span", "prompt", prompt);
  add(at("text"), "span", "t plain", first.replaceAll("\n", "↵\n"));
  spans = rounds.map((entry, number) => entry[0].map((text, place) => {
    const kind = place < entry[1] ? "accepted" : closing(entry);
    return Object.assign(add(at("text"), "span", `t ${kind}`, text.replaceAll("\n", "↵\n")), { onclick: () => go(number + 1) });
  }));
  const most = Math.max(1, ...rounds.map(([, accepted, rejected]) => accepted + rejected.length));
  at("strip").replaceChildren(...rounds.map(([, accepted, rejected], number) => {
    const title = `round ${number + 1}: ${accepted} of ${accepted + rejected.length} accepted`;
    const bar = Object.assign(document.createElement("button"), { tabIndex: -1, title, onclick: () => go(number + 1) });
    add(bar, "i", "rejected", "").style.height = `${100 * rejected.length / most}%`;
    add(bar, "i", "accepted", "").style.height = `${100 * accepted / most}%`;
    return bar;
  }));
  at("slider").max = Math.max(1, rounds.length);
  at("slider").disabled = at("play").disabled = !rounds.length;
  go(rounds.length);
}

function go(number) {
  const entry = sample.rounds[number - 1];
  at("chips").replaceChildren();
  if (!entry) { at("explanation").textContent = "The completion ended with its first token."; return; }
  round = at("slider").value = number;
  at("explanation").textContent = "";
  add(at("explanation"), "b", "", `Round ${number} of ${sample.rounds.length}: `);
  at("explanation").append(explain(entry));
  spans.forEach((tokens, index) => tokens.forEach(span => {
    span.classList.toggle("now", index === number - 1);
    span.classList.toggle("later", index > number - 1);
  }));
  [...at("strip").children].forEach((bar, index) => bar.classList.toggle("now", index === number - 1));
  const [emitted, accepted, rejected, others] = entry;
  const chips = (texts, kind) => texts.forEach(text => add(at("chips"), "span", `chip ${kind}`, visible(text)));
  chips(emitted.slice(0, accepted), "accepted");
  chips(rejected, "rejected");
  if (others) add(at("chips"), "span", "muted small", `and ${others} in other branches`);
  if (emitted.length > accepted && accepted + rejected.length) add(at("chips"), "span", "muted", "→");
  chips(emitted.slice(accepted), closing(entry));
}

function stop() {
  clearInterval(player);
  player = undefined;
  at("play").textContent = "▶ play";
}

function play() {
  if (player) { stop(); return; }
  at("play").textContent = "❚❚ pause";
  go(round < sample.rounds.length ? round : 1);
  player = setInterval(() => round < sample.rounds.length ? go(round + 1) : stop(), 350);
}

const groups = Object.create(null); // a category may be called like what every object has
samples.forEach(({ id, category, length }, index) => {
  groups[category] ??= Object.assign(add(at("sample"), "optgroup", "", ""), { label: category });
  groups[category].append(new Option(length === null ? id : `${id} · ${length.toFixed(2)}`, index));
});
const step = by => { stop(); show((Number(at("sample").value) + by + samples.length) % samples.length); };
at("sample").onchange = () => step(0);
at("before").onclick = () => step(-1);
at("after").onclick = () => step(1);
at("play").onclick = play;
at("slider").oninput = () => { stop(); go(Number(at("slider").value)); };
at("tokens").hidden = false;
show(0);
