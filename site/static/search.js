/* The search page: MiniSearch ranks the sections in searchindex.js, and each result shows its sentence.
   A query is a few words, or a message pasted whole or in part, with other shapes and names than the
   book's: no word must be found, and the more stand in a section, and side by side, the higher it is. */
const search = (() => {
  "use strict";
  const STOP = new Set("a an and are as at be by did do does for from how i in is it multi my of on or that the this to what when why with".split(" "));
  const ALSO = { // what people say: what the book calls it
    activation: "remat", amp: "bfloat16 dtype", checkpointing: "checkpoint remat", dataloader: "data loading grain process batch",
    ddp: "data parallelism", deepspeed: "fsdp strategy", dtensor: "sharding NamedSharding", fsdp2: "fsdp", gspmd: "Auto mode compiler",
    hf: "pretrained weights safetensors", hsdp: "FSDP two axes", huggingface: "pretrained weights safetensors",
    llama: "pretrained weights safetensors", loader: "loading grain", megatron: "tensor parallelism", mfu: "utilization FLOPs step time",
    multihost: "processes distributed initialize", multinode: "processes distributed initialize", host: "process", node: "process",
    offload: "memory space pinned_host", oom: "RESOURCE_EXHAUSTED out memory", pjit: "jit older", pmap: "shard_map older", profile: "profiler trace",
    remat: "checkpoint", resume: "restart restore checkpoint", slurm: "launch cluster", throughput: "step time", torch: "PyTorch terms",
    xmap: "shard_map older", zero: "optimizer state sharded ZeRO", zero1: "optimizer state sharded ZeRO", zero3: "fsdp",
  };
  const LISTS = /\/(?:messages|notation|how-it-is-tested)$/; // pages that name what others explain
  // A word, the parts of a name (with_sharding_constraint, ShardingTypeError), pairs of Chinese characters.
  const words = (text) => (text.match(/[㐀-鿿]+|(?:(?![㐀-鿿])[\p{L}\p{N}_])+/gu) || []).flatMap((run) => {
    if (/[㐀-鿿]/.test(run)) return run.length < 3 ? [run] : Array.from({ length: run.length - 1 }, (_, i) => run.slice(i, i + 2));
    if (/^[a-z\d]+$/.test(run)) return [run];
    const parts = run.match(/\p{Lu}?[\p{Ll}\p{N}]+|\p{Lu}+(?!\p{Ll})/gu) || [];
    return parts.length > 1 ? [run, ...parts] : [run];
  });
  const stem = (word) => {
    const low = word.toLowerCase();
    if (STOP.has(low) || /^\d+$/.test(low) || low === "_") return null;
    return low.length < 5 ? low : low.replace(/(?:ies|y)$/, "i").replace(/(?:ing|ed|es|s|e)$/, "");
  };
  const stems = (text) => words(text).map(stem).filter(Boolean);

  const index = new MiniSearch({ fields: ["heading", "title", "text", "code"], tokenize: words, processTerm: stem });
  index.addAll(SECTIONS.map((section, id) => ({ id, ...section })));
  const inOrder = SECTIONS.map(() => null); // a section's stems, made when it is first needed

  // Of the query's neighbouring words, the part that stands side by side in the section.
  const together = (asked, id) => {
    const { heading, text, code } = SECTIONS[id];
    inOrder[id] ??= ` ${stems([heading, text, code].join(" ")).join(" ")} `;
    const pairs = asked.slice(1).map((word, i) => ` ${asked[i]} ${word} `);
    return pairs.filter((pair) => inOrder[id].includes(pair)).length / Math.max(1, pairs.length);
  };

  const find = (query) => {
    const asked = stems(query), pasted = asked.length > 5;
    const also = pasted ? [] : query.toLowerCase().split(/[^\p{L}\p{N}]+/u).flatMap((word) => (Object.hasOwn(ALSO, word) ? ALSO[word].split(" ") : []));
    const own = new Set(asked);
    const found = index.search([query, ...also].join(" "), {
      boost: { heading: 3, title: 1.5, code: pasted ? 1 : 0.3 },
      boostTerm: (term) => (own.has(term) ? 1 : 0.6),
      boostDocument: (id) => (LISTS.test(SECTIONS[id].page) ? 0.5 : pasted && SECTIONS[id].page.includes("/messages-") ? 1.5 : 1),
      prefix: (term) => term.length > 3, fuzzy: (term) => (term.length > 5 && !pasted ? 0.2 : false),
      weights: { prefix: 0.3, fuzzy: 0.15 },
    });
    const best = found.slice(0, 60).map((one) => ({ ...SECTIONS[one.id], terms: new Set(one.terms), score: one.score * (1 + 2 * together(asked, one.id)) }));
    return best.sort((one, other) => other.score - one.score).slice(0, 20);
  };

  // The sentence with most of the words found, and what follows it if it is short.
  const sentence = ({ text, code, terms }) => {
    const count = (part) => new Set(stems(part).filter((word) => terms.has(word))).size;
    const parts = [text, code].join("\n").split(/(?<=[.?!])\s+(?=\P{Ll})|(?<=[。？！])|\n/u), counts = parts.map(count);
    let at = counts.indexOf(Math.max(...counts)), best = parts[at];
    while (best.length < 80 && ++at < parts.length) best += ` ${parts[at]}`;
    return best.length > 240 ? `${best.slice(0, 240).replace(/\s\S*$/, "")} …` : best;
  };
  const marked = (text, terms) => text.split(/([\p{L}\p{N}_]+)/u).map((part) => {
    if (!words(part).some((word) => terms.has(stem(word)))) return part;
    const mark = document.createElement("mark");
    mark.textContent = part;
    return mark;
  });

  const field = document.querySelector(".search-form input"), said = document.getElementById("search-said");
  const list = document.getElementById("search-results");
  const show = () => {
    const results = field.value.trim() ? find(field.value) : [];
    list.replaceChildren(...results.map((result) => {
      const item = document.createElement("li"), link = document.createElement("a"), context = document.createElement("p");
      link.href = `${result.page}.html${result.anchor && `#${result.anchor}`}`;
      link.append(result.heading);
      context.append(...marked(sentence(result), result.terms));
      item.append(link, context);
      if (result.anchor) link.after(Object.assign(document.createElement("small"), { textContent: result.title }));
      return item;
    }));
    said.textContent = field.value.trim() && !results.length ? said.dataset.none : "";
  };
  field.value = new URLSearchParams(location.search).get("q") || "";
  let waiting;
  field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 150); });
  show();
  return find;
})();
