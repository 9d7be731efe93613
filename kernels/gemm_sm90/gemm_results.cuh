// Results of gemm.cu: partial sums and squares exchanged in a cluster, the deferred norm, SwiGLU, residual, stores. Has a place
// in that file, whose constants and types it uses.

// To all of the cluster.
DEVICE void send_square_sums(const Share& share, float (&row_square_sums)[kSquareRows]) {
  const int thread = thread_index(), own = share.part * kMulticast + share.neighbour;
#pragma unroll
  for (int i = 0; i < kSquareRows; ++i) {
    float sum = row_square_sums[i];
    for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
    const int row = thread / 8 + i * (kConsumers / 8), rank = thread % 8;
    // The threads that have the sum take a CTA each.
    if (row >= kMulticastRows || rank >= kClusterCtas) continue;
    const u32 to = share.base + kSquareSumsAt + (share.part * kRows + share.neighbour * kMulticastRows + row) * 4;
    if (rank == own) {
      store_shared(to, sum);
    } else {
      send_one(of_cta(to, rank), sum, of_cta(sent_barrier(share), rank));
    }
  }
}

// The thread's 4 sums of a band and block.
DEVICE u32 sums_at(int thread) { return thread / 32 * kWarpBytes + thread % 32 * 16; }

DEVICE void leave_sums(const Share& share, const Sums& sums) {
  const u32 to = share.base + sums_at(thread_index());
#pragma unroll
  for (int band = 0; band < kBands; ++band)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float* from = &sums[block][4 * band];
      store_own(to + band * kBandBytes + block * kBlockBytes, float4{from[0], from[1], from[2], from[3]});
    }
}

// Where an owner keeps what `part` sends: of its first band.
DEVICE u32 others_at(int owner, int part) {
  return kOthersAt + (part < owner ? part : part - 1) * kMaxBands * kBandBytes;
}

// Each thread what it left itself.
DEVICE void send_sums(const Share& share) {
  const u32 at = share.base + sums_at(thread_index());
#pragma unroll 4
  for (int index = 0; index < kBands * kBlocks; ++index) {
    const int band = index / kBlocks, owner = owner_of(band), rank = owner * kMulticast + share.neighbour;
    if (owner == share.part) continue;
    const u32 to = at + others_at(owner, share.part) + (band - first_band(owner)) * kBandBytes;
    const u32 block_offset = index % kBlocks * kBlockBytes;
    send(of_cta(to + block_offset, rank), load_own(at + band * kBandBytes + block_offset),
         of_cta(sent_barrier(share), rank));
  }
}

// A warp stores a band's 64 weight rows in a step. A lane takes a pair of x's rows and 4 of a warp's 8 lines of sums: those
// of weight rows n to n + 3 and n + 8 to n + 11, which are 4 features' gate and up, or 8 features in two groups of 4.
// num_out is a multiple of 8.
struct Piece {
  int band, row, column;  // The first of both; rows of all bands, columns of the tile.
  u32 from;               // In shared memory, within the band.
  bool is_column[2];      // Whether the groups are there.
};

constexpr int kWarps = kConsumers / 32, kBandSteps = kTileN / 64;

DEVICE Piece piece_of(const Share& share, const Sizes& sizes, int step) {
  // Lanes that read at once read of two warps' sums, from other banks.
  const int lane = thread_index() % 32, pair = lane % 4, unit = lane / 4 % 4, half = lane / 16;
  const int tile_block = step % kBandSteps, warp = tile_block / kBlocks * 4 + unit;
  Piece piece;
  piece.band = first_band(share.part) + step / kBandSteps;
  piece.row = piece.band * 8 + pair * 2;
  piece.column = (tile_block * 4 + unit) * (kIsGated ? 8 : 16) + half * 4;
  piece.from = tile_block % kBlocks * kBlockBytes + warp * kWarpBytes + (half * 16 + pair) * 16;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int out_column = share.tile * kColumns + piece.column + group * 8;
    piece.is_column[group] = piece.band < first_band(share.part + 1) && out_column < sizes.num_out;
  }
  return piece;
}

DEVICE u64 at_of(const Share& share, const Sizes& sizes, const Piece& piece, int c, int group) {
  return (u64)(piece.row + c) * sizes.num_out + share.tile * kColumns + piece.column + group * 8;
}

// What a step's piece is added to: of row c, group.
struct Residuals {
  uint2 at[2][2];
};

DEVICE Residuals load_residual(const Share& share, const Sizes& sizes, const u16* residual, int step) {
  const Piece piece = piece_of(share, sizes, step);
  Residuals residuals;
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const bool is_there = residual && piece.is_column[group] && piece.row + c < sizes.num_rows;
      residuals.at[c][group] =
          is_there ? *(const uint2*)(residual + at_of(share, sizes, piece, c, group)) : uint2{0, 0};
    }
  return residuals;
}

// A piece's lines over all parts, in their order: x's rows' sums of a weight row, then of the one 8 behind it.
DEVICE void whole_sums(const Share& share, const Piece& piece, float4 (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int part = 0; part < kSplitK; ++part) {
    u32 from = share.base + piece.from;
    if (part == share.part) {
      from += piece.band * kBandBytes;
    } else {
      from += others_at(share.part, part) + (piece.band - first_band(share.part)) * kBandBytes;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 sum = load_own(from + i * 64);
      sums[i].x += sum.x, sums[i].y += sum.y, sums[i].z += sum.z, sums[i].w += sum.w;
    }
  }
}

// Adds the partial sums of squares of rows thread, thread + kConsumers, ...
constexpr int kGivenRows = (kRows + kConsumers - 1) / kConsumers;

DEVICE void load_square_sums(const Sizes& sizes, float (&given)[kGivenRows]) {
#pragma unroll
  for (int i = 0; i < kGivenRows; ++i) {
    const int row = thread_index() + i * kConsumers, nearest = row < sizes.num_rows ? row : 0;
    float sum = 0.0f;
#pragma unroll 8
    for (int index = 0; index < sizes.num_square_sums; ++index) sum += sizes.square_sums[index * sizes.num_rows + nearest];
    given[i] = sum;
  }
}

// 1 / sqrt(mean(x^2) + eps) of a row.
DEVICE float inverse_rms(const Share& share, const Sizes& sizes, int row) {
  if (sizes.eps < 0.0f) return 1.0f;
  float sum = load_one(share.base + kSquareSumsAt + row * 4);
  if (!sizes.square_sums)
#pragma unroll
    for (int part = 1; part < kSplitK; ++part) sum += load_one(share.base + kSquareSumsAt + (part * kRows + row) * 4);
  return reciprocal_root(sum * (1.0f / sizes.num_in) + sizes.eps);
}

DEVICE uint2 pack4(float a, float b, float c, float d) { return uint2{pack(a, b), pack(c, d)}; }

// silu(gate) x up of own bands to memory, two steps at once, so that what they read overlaps.
DEVICE void store_gated(const Share& share, const Sizes& sizes, u16* out) {
  const int num_steps = (first_band(share.part + 1) - first_band(share.part)) * kBandSteps, last = num_steps - 1;
  for (int step = thread_index() / 32; step < num_steps; step += 2 * kWarps) {
    Piece pieces[2];
    float4 sums[2][4];
    float factors[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = step + i * kWarps;
      pieces[i] = piece_of(share, sizes, own < last ? own : last);
      pieces[i].is_column[0] &= own <= last;
      whole_sums(share, pieces[i], sums[i]);
#pragma unroll
      for (int c = 0; c < 2; ++c) factors[i][c] = inverse_rms(share, sizes, pieces[i].row + c);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float gated[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gated[0][j] = silu(sums[i][j].x * factors[i][0]) * (sums[i][j].z * factors[i][0]);
        gated[1][j] = silu(sums[i][j].y * factors[i][1]) * (sums[i][j].w * factors[i][1]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (pieces[i].is_column[0] && pieces[i].row + c < sizes.num_rows)
          *(uint2*)(out + at_of(share, sizes, pieces[i], c, 0)) =
              pack4(gated[c][0], gated[c][1], gated[c][2], gated[c][3]);
    }
  }
}

// Own bands to memory; residuals: what the first step's piece is added to.
DEVICE void store(const Share& share, const Sizes& sizes, u16* out, const u16* residual, Residuals residuals) {
  const int num_steps = (first_band(share.part + 1) - first_band(share.part)) * kBandSteps;
  for (int step = thread_index() / 32; step < num_steps; step += kWarps) {
    const Residuals next_residuals = load_residual(share, sizes, residual, step + kWarps);
    const Piece piece = piece_of(share, sizes, step);
    float4 sums[4];
    whole_sums(share, piece, sums);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float row_square_sums = 0.0f;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const uint2 before = residuals.at[c][group];
        float numbers[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          numbers[j] = group ? (c ? sums[j].w : sums[j].z) : (c ? sums[j].y : sums[j].x);
        const uint2 packed = pack4(numbers[0] + low(before.x), numbers[1] + high(before.x), numbers[2] + low(before.y),
                                   numbers[3] + high(before.y));
        if (!piece.is_column[group] || piece.row + c >= sizes.num_rows) continue;
        *(uint2*)(out + at_of(share, sizes, piece, c, group)) = packed;
        row_square_sums += sum_of_squares(packed.x) + sum_of_squares(packed.y);
      }
      // Of 8 columns of a row, of which each lane has its own.
      if (sizes.square_sums_out) {
        const int row = piece.row + c - first_band(share.part) * 8, lane = thread_index() % 32;
        store_shared(share.base + kSquareSumsAt + (row * kRowPieces + step % kBandSteps * 8 + lane / 4) * 4, row_square_sums);
      }
    }
    residuals = next_residuals;
  }
}

// Of the tile's columns, of own rows.
DEVICE void store_square_sums(const Share& share, const Sizes& sizes) {
  const int first = first_band(share.part) * 8, end = first_band(share.part + 1) * 8;
  for (int row = first + thread_index(); row < end && row < sizes.num_rows; row += kConsumers) {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kRowPieces; ++piece)
      sum += load_one(share.base + kSquareSumsAt + ((row - first) * kRowPieces + piece) * 4);
    sizes.square_sums_out[share.tile * sizes.num_rows + row] = sum;
  }
}

