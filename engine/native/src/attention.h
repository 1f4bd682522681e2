// Causal attention over the paged cache.
//
// The query positions of a sequence times the query heads that share a kv head are the rows of a matrix product, so
// that each K and V number is read once for all of them, in decode as in prefill:
//
//            tokens of the context, 64 a tile
//           +--------+--------+--------+---
//   rows    |        |        |  \     |        row r is position r / group, head r % group
//   of a    |        |        |    \   |        right of the diagonal: not visible, and skipped by the tile
//   query   |        |        |      \ |
//   tile    +--------+--------+--------+---
//
// A prompt's task is a query tile of one kv head. A sequence with few query rows, as in decode, is one tile for all of
// its heads, which lie together in the cache; its context is cut into chunks of 256 tokens, each a task, and the parts
// are joined at the end. How it is cut depends on the sequence alone: the result depends neither on the number of
// threads nor on what else is in the batch.
#pragma once

#include <vector>

#include "softmax.h"
#include "thread_pool.h"

namespace pdserve {

struct Attention {
  const bf16* query;  // [tokens, heads, head_dim]
  int64_t query_stride;
  PagedCache cache;
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* seq_lens;     // [sequences]
  int64_t sequences, heads;
  int64_t window;  // tokens a query sees, itself included; 0: all before it
  float scale;
  bf16* out;  // [tokens, heads, head_dim]

  int64_t group() const { return heads / cache.kv_heads; }
  int64_t stride() const { return (cache.head_dim + kPanel - 1) / kPanel * kPanel; }  // of Progress::out
};

namespace attention_detail {

constexpr int kStripRows = 3 * kTileRows;  // scores of so many rows stay in the first-level cache with K and V
constexpr int64_t kChunkTokens = 256;

struct Task {
  int64_t sequence;
  int64_t first_token;                // query row of the batch
  int64_t first_position, positions;  // the same in the sequence, and how many
  int64_t first_head, kv_heads;
  int64_t context_begin, context_end;  // tokens
  int64_t first_part, part, parts;     // parts > 1: one of several chunks of the context, numbered over the batch

  int64_t rows_per_head(const Attention& op) const { return positions * op.group(); }
  int64_t rows(const Attention& op) const { return kv_heads * rows_per_head(op); }
};

struct Workspace {
  PackedTile packed;
  Location at, next;
  Progress progress;
  alignas(64) bf16 query[kQueryRows * kMaxHeadDim];  // [kv head][position][head of the group][head_dim]
  alignas(64) float scores[kStripRows * kTileTokens];
  alignas(64) bf16 weights[kStripRows * kTileTokens];
};

// ---------------------------------------------------------------- one tile of the context

struct TileOfTask {
  const Attention& op;
  const Task& task;
  int64_t begin;   // first token
  int64_t head;    // counted from the task's first
  Workspace& space;

  Visible visible(int64_t row) const {
    const int64_t position = task.first_position + row / op.group();
    const int64_t oldest = op.window > 0 ? std::max<int64_t>(0, position - op.window + 1) : 0;
    return {std::max<int64_t>(0, oldest - begin), std::min<int64_t>(space.at.count, position + 1 - begin)};
  }
  int64_t row_in_task(int64_t row) const { return head * task.rows_per_head(op) + row; }
  const bf16* query(int64_t row) const { return space.query + row_in_task(row) * op.cache.head_dim; }
  Row progress(int64_t row) const { return row_of(space.progress, row_in_task(row), op.stride()); }
  Tokens keys() const { return tokens(op.cache.keys); }
  Tokens values() const { return tokens(op.cache.values); }
  Tokens tokens(const bf16* data) const {
    return {data + (task.first_head + head) * op.cache.head_dim, space.at, space.next, op.cache.head_dim};
  }
};

// Rows [begin, end): scores → weights, both at the start of the workspace's.
inline void softmax_rows(const TileOfTask& tile, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    softmax_row(tile.space.scores + (row - begin) * kTileTokens, tile.visible(row), tile.op.scale * kLog2E,
                tile.progress(row), tile.space.weights + (row - begin) * kTileTokens);
  }
}

template <int Rows>
void attend_few(const TileOfTask& tile) {
  multiply_keys<Rows>(tile.query(0), tile.keys(), tile.space.scores);
  softmax_rows(tile, 0, Rows);
  multiply_values<Rows>(tile.space.weights, tile.values(), tile.progress(0).out, tile.op.stride());
}

inline void attend_strip(const TileOfTask& tile, int64_t begin, int64_t end) {
  const int64_t head_dim = tile.op.cache.head_dim, stride = tile.op.stride();
  const RowTiles rows{end - begin};
  for (int64_t i = 0; i < rows.count; ++i) {
    multiply_rows<Start::kZero>(rows.size(i), {tile.query(begin + rows.begin(i)), head_dim},
                                as_rows(tile.space.packed.keys), head_dim / 2,
                                {tile.space.scores + rows.begin(i) * kTileTokens, kTileTokens});
  }
  softmax_rows(tile, begin, end);
  for (int64_t i = 0; i < rows.count; ++i) {
    // The weights of tokens that not even the last of these rows sees are zero.
    const int64_t pairs = (tile.visible(begin + rows.begin(i + 1) - 1).end + 1) / 2;
    const Matrix weights{tile.space.weights + rows.begin(i) * kTileTokens, kTileTokens};
    for (int64_t panel = 0; panel * kPanel < stride; ++panel) {
      const Bf16Row* values = as_rows(tile.space.packed.values + panel * kTileTokens * kPanel);
      multiply_rows<Start::kAdd>(rows.size(i), weights, values, pairs,
                                 {tile.progress(begin + rows.begin(i)).out + panel * kPanel, stride});
    }
  }
}

inline void attend_many(const TileOfTask& tile) {
  const Attention& op = tile.op;
  pack_keys(tile.keys(), tile.space.packed.keys);
  pack_values(tile.values(), tile.space.packed.values);
  // Positions before the tile see none of it; with a window, nor do those that have moved past it.
  int64_t begin = std::max<int64_t>(0, tile.begin - tile.task.first_position) * op.group();
  int64_t end = tile.task.rows_per_head(op);
  if (op.window > 0) {
    const int64_t last_position = tile.begin + tile.space.at.count - 1 + op.window - 1;
    end = std::min(end, (last_position + 1 - tile.task.first_position) * op.group());
  }
  for (; begin < end; begin += kStripRows) attend_strip(tile, begin, std::min(begin + kStripRows, end));
}

inline void attend_tile(const TileOfTask& tile) {
  switch (tile.task.rows_per_head(tile.op)) {
    case 1: return attend_few<1>(tile);
    case 2: return attend_few<2>(tile);
    case 3: return attend_few<3>(tile);
    case 4: return attend_few<4>(tile);
    case 5: return attend_few<5>(tile);
    case 6: return attend_few<6>(tile);
    case 7: return attend_few<7>(tile);
    case 8: return attend_few<8>(tile);
    default: return attend_many(tile);
  }
}

// ---------------------------------------------------------------- one task

// The tile that begins at a token of the task's context.
inline void locate_tile(const Attention& op, const Task& task, int64_t begin, Location& at) {
  const int64_t count = std::min<int64_t>(kTileTokens, task.context_end - begin);
  locate(op.cache, task.sequence, begin, static_cast<int>(count), at);
}

inline void load_query(const Attention& op, const Task& task, Workspace& space) {
  const int64_t size = op.group() * op.cache.head_dim;
  bf16* to = space.query;
  for (int64_t head = task.first_head; head < task.first_head + task.kv_heads; ++head) {
    for (int64_t i = 0; i < task.positions; ++i, to += size) {
      __builtin_memcpy(to, op.query + (task.first_token + i) * op.query_stride + head * size, size * sizeof(bf16));
    }
  }
}

// Leaves its result in space.progress. following: what this thread is likely to do next.
inline void attend(const Attention& op, const Task& task, const Task* following, Workspace& space) {
  load_query(op, task, space);
  space.progress.clear(task.rows(op), op.stride());
  locate_tile(op, task, task.context_begin, space.next);
  for (int64_t begin = task.context_begin; begin < task.context_end; begin += kTileTokens) {
    space.at = space.next;
    if (begin + kTileTokens < task.context_end) {
      locate_tile(op, task, begin + kTileTokens, space.next);
    } else if (following) {
      locate_tile(op, *following, following->context_begin, space.next);
    }
    for (int64_t head = 0; head < task.kv_heads; ++head) attend_tile({op, task, begin, head, space});
  }
}

inline void store_row(const Attention& op, const Task& task, int64_t row, const float* out, float total) {
  const int64_t within = row % task.rows_per_head(op), group = op.group();
  const int64_t token = task.first_token + within / group;
  const int64_t head = (task.first_head + row / task.rows_per_head(op)) * group + within % group;
  bf16* to = op.out + (token * op.heads + head) * op.cache.head_dim;
  const __m512 scale = _mm512_set1_ps(1.0f / total);
  for (int64_t i = 0; i < op.cache.head_dim; i += kLanes) {
    store_bf16(to + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), scale));
  }
}

// ---------------------------------------------------------------- contexts that were cut

// Each part is as Progress has it, without room for rows that there are not.
struct Parts {
  std::vector<float>& memory;
  int64_t stride, rows = 0, count = 0;
  int64_t part_size() const { return rows * (stride + kLanes + 1); }
  void allocate() {
    if (static_cast<int64_t>(memory.size()) < count * part_size()) memory.resize(count * part_size());
  }
  float* out(int64_t part) const { return memory.data() + part * part_size(); }
  float* total(int64_t part) const { return out(part) + rows * stride; }
  float* reference(int64_t part) const { return total(part) + rows * kLanes; }

  void keep(int64_t part, int64_t rows_of_task, const Progress& progress) const {
    std::copy_n(progress.out, rows_of_task * stride, out(part));
    std::copy_n(progress.total, rows_of_task * kLanes, total(part));
    std::copy_n(progress.reference, rows_of_task, reference(part));
  }
};

inline void join(const Attention& op, const Task& task, const Parts& parts) {
  const int64_t end = task.first_part + task.parts;
  alignas(64) float out[kMaxHeadDim];
  for (int64_t row = 0; row < task.rows(op); ++row) {
    float reference = kNoneYet, total = 0.0f;
    for (int64_t part = task.first_part; part < end; ++part) {
      reference = std::max(reference, parts.reference(part)[row]);
    }
    std::fill_n(out, parts.stride, 0.0f);
    for (int64_t part = task.first_part; part < end; ++part) {
      const float share = std::exp2((parts.reference(part)[row] - reference) * op.scale * kLog2E);
      const float* from = parts.out(part) + row * parts.stride;
      total += share * sum(parts.total(part) + row * kLanes);
      for (int64_t dim = 0; dim < parts.stride; ++dim) out[dim] += share * from[dim];
    }
    store_row(op, task, row, out, total);
  }
}

// ---------------------------------------------------------------- cutting the batch into tasks

// Adds the tasks of one query tile: for all heads at once where that fits, else head by head.
inline void plan_tile(const Attention& op, Task tile, bool is_only, std::vector<Task>& tasks, Parts& parts) {
  const int64_t oldest = op.window > 0 ? std::max<int64_t>(0, tile.first_position - op.window + 1) : 0;
  const int64_t begin = oldest / kTileTokens * kTileTokens, end = tile.first_position + tile.positions;
  tile.kv_heads = is_only && tile.positions * op.heads <= kQueryRows ? op.cache.kv_heads : 1;
  tile.parts = is_only ? (end - begin + kChunkTokens - 1) / kChunkTokens : 1;
  for (; tile.first_head < op.cache.kv_heads; tile.first_head += tile.kv_heads) {
    tile.first_part = parts.count;
    for (int64_t part = 0; part < tile.parts; ++part) {
      tile.part = tile.first_part + part;
      tile.context_begin = begin + part * kChunkTokens;
      tile.context_end = tile.parts == 1 ? end : std::min(end, tile.context_begin + kChunkTokens);
      tasks.push_back(tile);
    }
    if (tile.parts == 1) continue;
    parts.count += tile.parts;
    parts.rows = std::max(parts.rows, tile.rows(op));
  }
}

// Of each prompt the longest first: what ends last should be short.
inline std::vector<Task> plan(const Attention& op, Parts& parts) {
  const int64_t tile_positions = std::max<int64_t>(1, kQueryRows / op.group());
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < op.sequences; ++sequence) {
    const int64_t start = op.query_start[sequence], query_len = op.query_start[sequence + 1] - start;
    const int64_t num_computed = op.seq_lens[sequence] - query_len;
    const int64_t tiles = (query_len + tile_positions - 1) / tile_positions;
    for (int64_t i = tiles - 1; i >= 0; --i) {
      Task tile{};
      tile.sequence = sequence;
      tile.first_token = start + i * tile_positions;
      tile.first_position = num_computed + i * tile_positions;
      tile.positions = std::min(tile_positions, query_len - i * tile_positions);
      plan_tile(op, tile, tiles == 1, tasks, parts);
    }
  }
  return tasks;
}

}  // namespace attention_detail

// What attention needs besides its arguments, kept from call to call.
struct AttentionWorkspaces {
  explicit AttentionWorkspaces(int num_threads) : of_thread(num_threads) {}
  std::vector<attention_detail::Workspace> of_thread;
  std::vector<float> parts;
};

inline void attention(ThreadPool& pool, const Attention& op, AttentionWorkspaces& workspaces) {
  using namespace attention_detail;
  Parts parts{workspaces.parts, op.stride()};
  const std::vector<Task> tasks = plan(op, parts);
  const auto count = static_cast<int64_t>(tasks.size());
  parts.allocate();
  pool.for_each(count, [&](int64_t i, int thread) {
    const Task& task = tasks[i];
    Workspace& space = workspaces.of_thread[thread];
    const int64_t following = i + pool.num_threads();
    attend(op, task, following < count ? &tasks[following] : nullptr, space);
    if (task.parts > 1) return parts.keep(task.part, task.rows(op), space.progress);
    for (int64_t row = 0; row < task.rows(op); ++row) {
      store_row(op, task, row, space.progress.out + row * op.stride(), sum(space.progress.total + row * kLanes));
    }
  });
  if (parts.count == 0) return;
  pool.for_each(count, [&](int64_t i, int) {
    if (tasks[i].parts > 1 && tasks[i].part == tasks[i].first_part) join(op, tasks[i], parts);
  });
}

}  // namespace pdserve
