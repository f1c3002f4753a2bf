// Prepares a question for the theme's search, which looks up every word as the beginning of a word of the pages.
// English: without words that every page has, and without the endings of plurals and of -ing. Chinese: without question words.
const STOP_WORDS = new Set(("a an and are as at be by can do does for from how i if in into is it its me my need of on or shall should "
  + "so than that the then there this to use was what when where which why will with you your").split(" "));
const QUESTION_WORDS = /为什么|怎么样|怎么|怎样|如何|什么|哪些|哪里|哪个|多少|是不是|能不能|可以|需要|应该|[的了吗呢么]/g;

function searchBeginning(word) {
  if (!/^[A-Za-z]{4,}$/.test(word)) return word;
  if (/(?:ss|x|z|ch|sh)es$/.test(word)) return word.slice(0, -2);
  if (/[^su]s$/.test(word)) return word.slice(0, -1);
  return /^\w{5,}ing$/.test(word) ? word.slice(0, -3) : word;
}

function searchQuery(question) {
  if (question.includes('"')) return question;   // what is in quotes is searched as it is
  const chinese = question.replace(QUESTION_WORDS, " ").trim() || question;
  const words = chinese.split(/[\s?!,;？！，。；]+/).filter(Boolean);
  const kept = words.filter(word => !STOP_WORDS.has(word.toLowerCase()));
  return (kept.length ? kept : words).map(searchBeginning).join(" ");
}

// The theme has no place for this: its messages to the search worker pass here. Type 2 is a query.
if (typeof Worker === "function") {
  const send = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    const asked = message && message.type === 2 && typeof message.data === "string";
    return send.call(this, asked ? { ...message, data: searchQuery(message.data) } : message, ...rest);
  };
}
