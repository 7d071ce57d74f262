// The scheduler of `cuda_on_host.h`: threads of a block as fibers, in random order, until none is left or none can go on.
#include "cuda_on_host.h"

#include <ucontext.h>

#include <random>

alignas(1024) uchar buf_dyn_shmem[SHARED_BYTES];
bool late_copies, late_products;
Pending pending[THREADS];
Place *thread_place, blockIdx;

namespace {

struct Fiber {
  ucontext_t context;
  Place place;
  std::vector<char> stack = std::vector<char>(1 << 17);
  std::function<bool()> ready;
  bool done;
};

Fiber fibers[THREADS];
ucontext_t scheduler;
int current;
Work kernel;
std::mt19937 chance;
int met[16], meetings[16];
float offered[2][THREADS];
int offers[THREADS];

void enter() {
  kernel();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

void prepare(int number) {
  Fiber &fiber = fibers[number];
  fiber.place = {number, 0, 0}, fiber.done = false, fiber.ready = [] { return true; };
  pending[number] = Pending(), offers[number] = 0;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&fiber.context, enter, 0);
}

bool finish_copies(int number, size_t most) {
  auto &copies = pending[number].copies;
  bool any = false;
  for (; most-- && !copies.empty(); copies.pop_front(), any = true) copies.front()();
  return any;
}

// Some copies of some threads end, and some threads that can go on do so, in an order that nobody chose.
bool take_turns(int &left) {
  bool moved = false;
  if (chance() % 2)
    for (int count = chance() % THREADS; count--;) moved |= finish_copies(chance() % THREADS, chance() % 80);
  int first = chance() % THREADS, step = chance() % 2 ? 1 : THREADS - 1, most = 1 + chance() % THREADS;
  for (int turn = 0; turn < THREADS && most; ++turn) {
    Fiber &fiber = fibers[current = (first + turn * step) % THREADS];
    if (fiber.done || !fiber.ready()) continue;
    fiber.ready = [] { return true; };
    thread_place = &fiber.place;
    swapcontext(&scheduler, &fiber.context);
    moved = true, --most, left -= fiber.done;
  }
  return moved;
}

void run_block() {
  for (uchar *byte = buf_dyn_shmem; byte < buf_dyn_shmem + SHARED_BYTES; ++byte) *byte = 0xff;  // not a number
  for (int number = 0; number < THREADS; ++number) prepare(number);
  for (int left = THREADS; left;) {
    if (take_turns(left)) continue;
    bool moved = false;
    for (int number = 0; number < THREADS; ++number) moved |= finish_copies(number, SIZE_MAX);
    if (!moved) fail("every thread waits for another");
  }
}

}  // namespace

int thread() { return current; }

void fail(const char *why) {
  fprintf(stderr, "%s\n", why);
  _Exit(3);
}

void block_until(std::function<bool()> ready) {
  Fiber &fiber = fibers[current];
  fiber.ready = std::move(ready);
  swapcontext(&fiber.context, &scheduler);
}

void meet(int barrier, int threads) {
  int meeting = meetings[barrier];
  if (++met[barrier] == threads) {
    met[barrier] = 0, ++meetings[barrier];
    return;
  }
  block_until([=] { return meetings[barrier] != meeting; });
}

float reduce_of_four(float value, bool largest) {
  int first = current / 4 * 4, turn = ++offers[current];
  offered[turn & 1][current] = value;
  block_until([=] {
    for (int other = first; other < first + 4; ++other)
      if (offers[other] < turn) return false;
    return true;
  });
  float *row = offered[turn & 1] + first;
  return largest ? max(max(row[0], row[1]), max(row[2], row[3])) : row[0] + row[1] + (row[2] + row[3]);
}

extern "C" void mla_slots_kernel(const bfloat16_t *latents, bfloat16_t *out, const bfloat16_t *q, const int *slots,
                                 float *sums, int heads, int parts, float scale_log2, int width, int work);

// `late`: bit 0 for products, bit 1 for copies.
extern "C" void run(const bfloat16_t *latents, bfloat16_t *out, const bfloat16_t *q, const int *slots, float *sums,
                    int heads, int parts, float scale_log2, int width, int work, int blocks, int late, int seed) {
  late_products = late & 1, late_copies = late & 2;
  chance.seed(seed);
  kernel = [=] { mla_slots_kernel(latents, out, q, slots, sums, heads, parts, scale_log2, width, work); };
  for (int block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    run_block();
  }
}
