/* An error message leads to its entry, from any part of it, or pasted whole; loaded by search.html.
   Sphinx asks for half of a heading, and for every word of a query. Here a heading is found too by a
   piece of it (three words or more), and by a longer text that holds one; … in a heading stands
   for what varies, · or a comma and "formerly", "or", "and", "of" between two messages, and every
   number for any other.
   Sphinx stores titles of pages as HTML and headings as text, and shows both as HTML: here both are
   text until they are shown. */
(() => {
  const words = (text) => (text.toLowerCase().replace(/\d+/g, "0").match(/[\p{L}\p{N}_]+/gu) || []).join(" ");
  const count = (text) => text.split(" ").length;
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const text = (html) => new DOMParser().parseFromString(html, "text/html").body.textContent;
  const sphinx = Search._performSearch, setIndex = Search.setIndex;

  Search.setIndex = (index) => setIndex({...index, titles: index.titles.map(text)});

  Search._performSearch = (query, ...rest) => {
    const {alltitles, docnames, filenames, titles} = Search._index;
    const asked = words(query), found = [];
    for (const [title, places] of Object.entries(alltitles)) {
      const pieces = title.split(/…| · |, (?:or|formerly|of|and) /).map(words).filter((piece) => count(piece) > 2);
      const within = count(asked) > 2 && words(title).includes(asked) ? [asked] : [];
      const held = pieces.filter((piece) => ` ${asked} `.includes(` ${piece} `));
      const score = [...new Set([...within, ...held])].join("").length;
      for (const [file, id] of score ? places : [])
        if (id !== null && titles[file] !== title)
          found.push([docnames[file], `${titles[file]} > ${title}`, `#${id}`, null, 100 + score, filenames[file]]);
    }
    found.sort((one, other) => one[4] - other[4]); // the last is shown first
    const known = new Set(found.map((one) => one[0] + one[2]));
    const others = sphinx(query, ...rest).filter((one) => !known.has(one[0] + one[2]));
    return [...others, ...found].map(([file, title, ...more]) => [file, escaped(title), ...more]);
  };
})();
