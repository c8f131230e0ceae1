// Interleaves GGUF blocks into tiles of 16 rows; every weight bit and every scale is kept as it is.
#include <string.h>

#include "tensors.h"

namespace {

int block_bytes(int type) { return type == kQ4_0 ? 18 : type == kQ4_1 ? 20 : 34; }

// 4 input bytes of each row side by side; 8-bit weights become unsigned by flipping their top bit.
void pack_row(const MatrixArgs& from, Matrix& to, int64_t tile, int lane) {
    const int bytes = block_bytes(from.type), header = from.type == kQ4_1 ? 4 : 2, quants = bytes - header;
    const uint32_t flip = from.type == kQ8_0 ? 0x80808080u : 0u;
    const int64_t row = tile * kTile + lane, source = from.row_order ? from.row_order[row] : row;
    const uint8_t* block = from.data + source * to.blocks * bytes;
    for (int b = 0; b < to.blocks; ++b, block += bytes) {
        const int64_t at = tile * to.blocks + b;
        memcpy(&to.scales[at * kTile + lane], block, 2);
        if (to.mins) memcpy(&to.mins[at * kTile + lane], block + 2, 2);
        uint8_t* out = to.quants + at * to.quant_bytes() + lane * 4;
        for (int i = 0; i < quants; i += 4) {
            uint32_t word;
            memcpy(&word, block + header + i, 4);
            word ^= flip;
            memcpy(out + i / 4 * 64, &word, 4);
        }
    }
}

bool valid(Model& model, const MatrixArgs& from) {
    if (from.type < kQ4_0 || from.type > kQ8_0 || from.cols < kBlock || from.cols % kBlock != 0 || from.rows < 1)
        return !fail(model, "a matrix of type %d with %d rows of %d values cannot be packed", from.type, from.rows, from.cols);
    for (int i = 0; from.row_order && i < from.rows; ++i)
        if (from.row_order[i] < 0 || from.row_order[i] >= from.rows)
            return !fail(model, "the row order names row %d of %d", from.row_order[i], from.rows);
    return true;
}

}  // namespace

int pack(Model& model, const MatrixArgs& from, Matrix& to) {
    if (!valid(model, from)) return 1;
    to = Matrix{};
    to.type = from.type;
    to.rows = from.rows;
    to.cols = from.cols;
    to.tiles = (from.rows + kTile - 1) / kTile;
    to.blocks = from.cols / kBlock;
    const size_t blocks = static_cast<size_t>(to.tiles) * static_cast<size_t>(to.blocks);
    const size_t quants = blocks * static_cast<size_t>(to.quant_bytes()), scales = blocks * kTile * 2;
    to.bytes = quants + scales * (from.type == kQ4_1 ? 2 : 1);
    auto* memory = static_cast<uint8_t*>(model.arena.take(to.bytes));
    if (memory == nullptr) return fail(model, "there is no memory for a matrix of %zu bytes", to.bytes);
    to.quants = memory;
    to.scales = reinterpret_cast<uint16_t*>(memory + quants);
    to.mins = from.type == kQ4_1 ? to.scales + scales / 2 : nullptr;
    if (to.rows % kTile) memset(memory, 0, to.bytes);  // rows that fill up the last tile have scale 0
    const int chunks = to.tiles < 64 ? to.tiles : 64;
    model.pool->each(chunks, [&](int chunk, int) {
        const Range tiles = share(to.tiles, chunks, chunk);
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile)
            for (int lane = 0; lane < kTile && tile * kTile + lane < to.rows; ++lane) pack_row(from, to, tile, lane);
    });
    return 0;
}
