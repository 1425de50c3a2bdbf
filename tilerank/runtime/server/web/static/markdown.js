/* Turns Markdown, which a model wrote and nobody has checked, into elements. */
import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import { button, copy, element } from "./dom.js";

const escaped = (text) => hljs.highlight(text, { language: "plaintext" }).value;
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    code({ text, lang }) {
      const language = hljs.getLanguage(lang?.split(/\s/)[0] ?? "") ? lang.split(/\s/)[0] : "plaintext";
      return `<pre><code class="hljs ${language}">${hljs.highlight(text, { language }).value}</code></pre>\n`;
    },
    html: ({ text }) => escaped(text),  // shown as it is written
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // A picture would send what its address contains to another server.
    image({ href, text }) { return this.link({ href, tokens: [{ type: "text", raw: text, text: text || href }] }); },
  },
});
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

export function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const box = element("div", { className: "code" });
    block.replaceWith(box);
    box.append(codeHead(block), block);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", { className: "table" });  // scrolls where the page is narrow
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

function codeHead(block) {
  const language = block.firstElementChild?.classList[1] ?? "plaintext";
  const copies = button("Copy", () => copy(copies, block.textContent, block), { className: "quiet" });
  return element("div", { className: "code-head" }, language === "plaintext" ? "" : language, copies);
}
