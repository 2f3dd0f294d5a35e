// The end of a decode step: add each row's token, detect whether its sequence ends, and prepare
// the next step, all on the device.
#include "common.cuh"

// Columns of `rows`, in the order of StepRow in step_update.py.
enum Column {
  LENGTH,      // tokens of the sequence, prompt included
  GENERATED,   // of them, after the prompt
  MAX_TOKENS,  // generated tokens at which the sequence ends
  MIN_TOKENS,  // generated tokens within which no stop string counts
  AUTOMATON,   // where its states begin in the tables; -1: the sequence has no stop strings
  STATE,       // of the automaton, counted from there
  TEXT_BYTES,  // of the generated text
  REASON,      // why the sequence ended; 0 while it runs
  STOP_BEGIN,  // the byte of the text at which a stop string begins; -1: none was found
  COLUMNS
};
enum Reason { RUNNING, STOP_STRING, END_TOKEN, MAX_LENGTH, NOT_FINITE, NO_ROOM };

// Follow an automaton (Aho-Corasick, trans [states, 256]) through a
// token's bytes.  Of the stops that are complete by its end, the one that begins first wins, then
// the longest: a later end with the same beginning is longer.  longest[state]: of the stop that ends
// where the state is entered, 0 if none does.
struct Stops {
  const unsigned short* trans;
  const unsigned short* longest;

  __device__ bool feed(int& state, const unsigned char* bytes, int count, int& begin) const {
    bool found = false;
    for (int end = 1; end <= count; ++end) {
      state = trans[state * 256 + bytes[end - 1]];
      const int length = longest[state];
      if (length > 0 && (!found || end - length <= begin)) {
        found = true;
        begin = end - length;
      }
    }
    return found;
  }
};

// One thread a row.  A row that ended in an earlier step is left as it is, and its next step reads
// and writes nothing: cache block -1, attention length 0.
//
// tokens [batch]: what was drawn, -1 where the scores were not finite.  rows [batch, COLUMNS].
// history [batch, capacity]; seen [batch, words], a bitmap; counts [batch, vocab_size].
// token_bytes, byte_starts [vocab_size + 1]: the text of each token.  ends [batch, n_ends]: tokens
// that end the sequence, padded with -1.  block_tables [batch, table_width].
// next [4, batch]: ids, positions, cache blocks and offsets in them; attention_lengths [batch].
// finished: counts the rows that have ended (may lie in the host's memory).
__global__ void __launch_bounds__(128)
    step_update(const int64* __restrict__ tokens, int* __restrict__ rows, int* __restrict__ history,
                int capacity, int* __restrict__ seen, int words, int* __restrict__ counts,
                int vocab_size, const unsigned short* __restrict__ trans,
                const unsigned short* __restrict__ longest,
                const unsigned char* __restrict__ token_bytes, const int* __restrict__ byte_starts,
                const int64* __restrict__ ends, int n_ends, const int* __restrict__ block_tables,
                int table_width, int block_size, int64* __restrict__ next,
                int* __restrict__ attention_lengths, int* __restrict__ finished, int batch) {
  const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= batch) return;
  int* const row = rows + i * COLUMNS;
  const int64 token = tokens[i];
  const int position = row[LENGTH];
  bool runs = row[REASON] == RUNNING;
  if (runs) {
    int reason = RUNNING;
    if (token < 0 || token >= vocab_size) {
      reason = NOT_FINITE;
    } else if (position >= capacity || position / block_size >= table_width) {
      reason = NO_ROOM;
    } else {
      history[i * capacity + position] = static_cast<int>(token);
      row[LENGTH] = position + 1;
      const int generated = ++row[GENERATED];
      seen[i * words + token / 32] |= static_cast<int>(1u << token % 32);
      ++counts[i * vocab_size + token];
      for (int j = 0; j < n_ends; ++j) {
        if (ends[i * n_ends + j] == token) reason = END_TOKEN;
      }
      if (reason == RUNNING) {  // an end token's bytes are no part of the text
        const int start = byte_starts[token], count = byte_starts[token + 1] - start;
        if (row[AUTOMATON] >= 0) {
          const int64 first = row[AUTOMATON];
          const Stops stops{trans + first * 256, longest + first};
          int state = row[STATE], begin = 0;
          const bool found = stops.feed(state, token_bytes + start, count, begin);
          row[STATE] = state;
          if (found && generated > row[MIN_TOKENS]) {
            reason = STOP_STRING;
            row[STOP_BEGIN] = row[TEXT_BYTES] + begin;
          }
        }
        row[TEXT_BYTES] += count;
        if (reason == RUNNING && generated >= row[MAX_TOKENS]) reason = MAX_LENGTH;
      }
    }
    row[REASON] = reason;
    runs = reason == RUNNING;
    if (!runs) atomicAdd(finished, 1);
  }
  next[i] = runs ? token : 0;
  next[batch + i] = runs ? position : 0;
  next[2 * batch + i] = runs ? block_tables[i * table_width + position / block_size] : -1;
  next[3 * batch + i] = position % block_size;
  attention_lengths[i] = runs ? position + 1 : 0;
}
