// The tokens that two completions have in common.

/** The most comparisons of a token with another one, above which the middles of two texts count as different. */
const MOST = 4e6;

/**
 * For each token of either list, whether it belongs to the longest part, with gaps, that both have in this order.
 *
 * `isWhole` is false if what lies between the equal beginnings and ends was too long to be compared.
 */
export function inCommon(ones, others) {
  const one = new Array(ones.length).fill(false);
  const other = new Array(others.length).fill(false);
  let begin = 0;
  let end = 0;
  const most = Math.min(ones.length, others.length);
  const both = (i, j) => (one[i] = other[j] = true);
  while (begin < most && ones[begin] === others[begin]) {
    both(begin, begin);
    begin += 1;
  }
  while (end < most - begin && ones.at(-1 - end) === others.at(-1 - end)) {
    end += 1;
    both(ones.length - end, others.length - end);
  }
  const rows = ones.length - begin - end;
  const columns = others.length - begin - end;
  const isWhole = rows * columns <= MOST;
  if (isWhole) {
    const middles = [ones, others].map((each) => each.slice(begin, each.length - end));
    for (const [i, j] of matches(...middles)) both(begin + i, begin + j);
  }
  return { one, other, isWhole };
}

/** The places of a longest common subsequence, by dynamic programming from the end. */
function matches(ones, others) {
  const width = others.length + 1;
  const longest = new Uint32Array((ones.length + 1) * width);
  for (let i = ones.length - 1; i >= 0; i--) {
    for (let j = others.length - 1; j >= 0; j--) {
      const at = i * width + j;
      longest[at] =
        ones[i] === others[j] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; i < ones.length && j < others.length; ) {
    if (ones[i] === others[j]) found.push([i++, j++]);
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return found;
}
