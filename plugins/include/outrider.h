/* liboutrider: exact speculative sampling. The C interface, the same on the CPU and on a GPU.
 *
 * One call verifies a round for all slots (`outrider_verify`), another makes the draft's own draw
 * (`outrider_draw`). Nothing here allocates, throws or keeps state; calls are thread-safe as long as
 * they do not share a workspace or outputs. A slot's results depend on that slot alone: neither on
 * the batch, nor on the number of threads, nor on the instruction set.
 *
 * Shapes: B slots, gamma draft tokens (at most `width` of them), V tokens of the target's
 * vocabulary. Ids outside [0, V) have probability 0.
 */
#ifndef OUTRIDER_H
#define OUTRIDER_H

#ifndef __CUDACC_RTC__
#include <stddef.h>
#include <stdint.h>
#else /* NVRTC has no headers of its own */
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif

#if defined(__GNUC__) && !defined(__CUDACC_RTC__)
#define OUTRIDER_API __attribute__((visibility("default")))
#else
#define OUTRIDER_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define OUTRIDER_ABI_VERSION 12
#define OUTRIDER_MAX_WIDTH 64 /* draft tokens in a round */

enum {
  OUTRIDER_OK = 0,
  OUTRIDER_BAD_ARGUMENT = 1,
  OUTRIDER_BAD_PARAMETER = 2,
  OUTRIDER_SMALL_WORKSPACE = 3,
  OUTRIDER_NO_DRAFT_LOGITS = 4, /* the sigmoid rule needs them */
  /* of one slot; the call itself then returns OUTRIDER_SLOT_FAILED */
  OUTRIDER_SLOT_FAILED = 5,
  OUTRIDER_NAN = 6,
  OUTRIDER_INFINITE = 7, /* +inf */
  OUTRIDER_NO_TOKEN = 8  /* nothing but -inf */
};

enum { OUTRIDER_FLOAT32 = 0, OUTRIDER_FLOAT16 = 1, OUTRIDER_BFLOAT16 = 2 };

/* `greedy` is any exact rule at temperature 0. By the coupled rule the seed alone decides which token p
 * gives at a position, and the draft's draws use the same noise: a draft stands where it is that token. */
enum { OUTRIDER_TOKEN = 0, OUTRIDER_BLOCK = 1, OUTRIDER_SIGMOID = 2, OUTRIDER_COUPLED = 3 };

enum { OUTRIDER_TARGET = 0, OUTRIDER_DRAFT = 1 };

/* Logits [*, rows, vocab_size]; strides in bytes, without any alignment. */
typedef struct {
  const void* data; /* NULL: a draft without a distribution (n-gram lookup): point masses */
  int64_t slot_stride;
  int64_t row_stride;
  int32_t vocab_size;
  int32_t dtype;
} outrider_logits;

/* How one slot samples, and where it is. */
typedef struct {
  uint64_t seed;
  double top_p;              /* (0, 1]; 1 is off */
  double lenience;           /* (0, 1]; below 1 not exact */
  double sigmoid_alpha;      /* < 0 */
  double sigmoid_beta;       /* > 0 */
  const int64_t* context;    /* the ids before the round, for the penalties */
  const int64_t* suppress;   /* ids that get probability 0 */
  const int64_t* bias_ids;   /* ascending: what is added to their logits, before any penalty */
  const float* biases;
  int32_t context_length;
  int32_t output_start;      /* context from here on is output: its ids are counted */
  int32_t suppress_length;
  int32_t bias_length;
  int32_t suppress_rows;     /* rows 0 .. suppress_rows - 1 of the round suppress, later ones do not */
  float temperature;         /* 0: argmax, lowest index on ties */
  float min_p;               /* [0, 1]; 0 is off */
  float repetition_penalty;  /* > 0; 1 is off */
  float frequency_penalty;   /* off a logit for each time that its id is output; 0 is off */
  float presence_penalty;    /* off a logit whose id is output; 0 is off */
  int32_t top_k;             /* 0 is off */
  int32_t rule;              /* all but token want lenience 1, sigmoid a temperature */
  int32_t gamma;             /* draft tokens of this slot, 0 .. width; -1: this slot sits out */
  uint32_t position;         /* absolute index of the round's first token */
  int32_t index;             /* which slot of the logits is this one's */
  int32_t reserved;
} outrider_slot;

/* What a row's distribution needs beside its logits: filled by `outrider_draw` for the draft's rows,
 * so that a verification reads the logits of one of them at most. weight(x) = 2^((z_x - peak) *
 * rate), 0 below `cut`; q(x) = weight(x) / total. */
typedef struct {
  double total;
  float peak;
  float rate;                /* log2(e) / temperature; 0: a point mass on `token` */
  float cut;                 /* logits below it have weight 0, */
  int32_t tie_from;          /* and those equal to it, where their index is below this one */
  float min_weight;
  int32_t token;             /* what was drawn */
  float weight;              /* of that token */
  int32_t status;            /* OUTRIDER_OK, or what is wrong with the row: a verification looks */
} outrider_row;

/* The outcome of a round for one slot. */
typedef struct {
  int64_t token;    /* the one after the accepted: correction, or bonus */
  int32_t accepted; /* n of the draft tokens stand */
  int32_t examined; /* ratios written: min(1, p/q) of the positions that the rule looked at */
  int32_t status;   /* OUTRIDER_OK, or what is wrong with a row; then token is -1 */
  int32_t model;    /* of that row: OUTRIDER_TARGET or OUTRIDER_DRAFT */
  int32_t row;      /* 0 is the round's first */
  int32_t reserved;
} outrider_verdict;

OUTRIDER_API const char* outrider_status_text(int32_t status);
OUTRIDER_API int32_t outrider_abi_version(void);

/* Bytes that a call with these sizes wants; 0 for illegal sizes. vocab_size: the larger one of target
 * and draft. threads: as in the call. */
OUTRIDER_API size_t outrider_workspace_size(int32_t vocab_size, int32_t width, int32_t threads);

/* Draw the draft token of step `step` for every slot with step < gamma.
 *
 * logits: row 0 of each slot is read. drafts [slots, width]: tokens of earlier steps are read (for
 * the penalty), this step's is written. rows [slots, width]: this step's is written. uniforms: NULL
 * for Philox, or [slots, width]. verdicts: NULL, or [slots]; status and row are written.
 */
OUTRIDER_API int32_t outrider_draw(const outrider_logits* logits, const outrider_slot* slots,
                      int32_t slot_count, int32_t width, int32_t step, const double* uniforms,
                      int64_t* drafts, outrider_row* rows, outrider_verdict* verdicts,
                      void* workspace, size_t workspace_size, int32_t threads);

/* Verify a round: target rows 0 .. gamma against draft rows 0 .. gamma - 1, for every slot.
 *
 * draft: the logits that the drafts were drawn from; the caller keeps them from the draws until
 * here. rows [slots, width]: from outrider_draw, or NULL: computed here. uniforms: NULL for Philox,
 * or [slots, width + 1]: the accept tests', then the final draw's. ratios: NULL, or [slots, width].
 */
OUTRIDER_API int32_t outrider_verify(const outrider_logits* target, const outrider_logits* draft,
                        const outrider_slot* slots, int32_t slot_count, int32_t width,
                        const double* uniforms, const int64_t* drafts, const outrider_row* rows,
                        outrider_verdict* verdicts, double* ratios, void* workspace,
                        size_t workspace_size, int32_t threads);

/* The warped weights of row 0 of one slot, unnormalised, float32 [vocab_size], for tests and tools.
 * The workspace is that of width OUTRIDER_MAX_WIDTH and one thread. Returns the row's status. */
OUTRIDER_API int32_t outrider_warp(const outrider_logits* logits, const outrider_slot* slot, float* weights,
                      double* total, void* workspace, size_t workspace_size);

/* Philox 4x32-10 and the 53-bit uniform in [0, 1) that is made from it. */
OUTRIDER_API void outrider_philox4x32(uint64_t key, const uint32_t counter[4], uint32_t answer[4]);
OUTRIDER_API double outrider_uniform(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t lane);

/* Natural logarithms of the softmax of a row of float32 logits [vocab_size], in double precision. */
OUTRIDER_API void outrider_log_softmax(const float* logits, int32_t vocab_size, double* logprobs);

/* The softmax probability of one id where the logits are divided by `temperature`. */
OUTRIDER_API double outrider_confidence(const float* logits, int32_t vocab_size, int64_t id,
                                        double temperature);

/* Round a block of a matrix's columns to 4 bits, for whoever quantises weights.
 *
 * wanted [columns, rows], columns up to 32: what the numbers have to be. numbers [columns, rows],
 * which may be the same array: what they are; level * scale is taken from them. scales [rows]: of
 * each row the one that loses least, a number of float16. levels: -8 .. 7, those of row n from n *
 * level_stride on. inverse [columns, columns], upper triangular with ones on its diagonal: how an
 * error of one column changes what the later ones have to be, finite; NULL where it does not.
 * BAD_PARAMETER for NaN, infinity and what no scale reaches: of the outputs nothing is known then.
 */
OUTRIDER_API int32_t outrider_round4(const float* wanted, float* numbers, int64_t rows, int32_t columns,
                                     const float* inverse, int8_t* levels, int64_t level_stride,
                                     float* scales, int32_t threads);

/* --- the same on a GPU: what to launch ---------------------------------------------------------
 *
 * liboutrider launches nothing itself: these functions run on the host, touch no GPU, and say which
 * kernels of outrider_cuda.cu to launch, in order, on one stream. Grids, blocks and addresses depend
 * on what is passed here alone, so a captured graph replays a plan; slots, drafts, logits, uniforms
 * and the ids that slots point to are read on the device, when a kernel runs.
 *
 * The workspace is device memory, 256-byte-aligned, zeroed once when it is made (the kernels leave
 * its counters at 0). It belongs to one outrider_device_sizes: draws and verifications of that may
 * share it as long as they follow each other on a stream.
 *
 * A GPU has no counts of ids: frequency_penalty, presence_penalty and biases are BAD_PARAMETER there.
 */

/* What the slots of a plan may ask for. A slot that asks for more gets OUTRIDER_BAD_PARAMETER, as one
 * with an illegal parameter does. Fewer flags are fewer launches and less memory. */
enum {
  OUTRIDER_DEVICE_FILTERS = 1,   /* top_k, top_p, min_p */
  OUTRIDER_DEVICE_PENALTIES = 2, /* repetition_penalty, suppress */
  OUTRIDER_DEVICE_BLOCK = 4,     /* the block rule */
  OUTRIDER_DEVICE_SHAPES = 8,    /* to verify with rows == NULL against a draft's logits */
  OUTRIDER_DEVICE_COUPLED = 16   /* the coupled rule */
};

typedef struct {
  int32_t slot_count;       /* 1 .. 65535 */
  int32_t width;            /* draft tokens in a round, 0 .. OUTRIDER_MAX_WIDTH */
  int32_t vocab_size;       /* the target's; 0 where there are only draws */
  int32_t draft_vocab_size; /* 0 where the draft has no logits */
  int32_t flags;            /* OUTRIDER_DEVICE_... */
  int32_t reserved;
} outrider_device_sizes;

typedef struct {
  const char* kernel; /* its name in the cubin; the text is static */
  uint32_t grid[3];
  uint32_t block; /* threads, one-dimensional; no dynamic shared memory */
} outrider_device_launch;

#define OUTRIDER_DEVICE_MAX_LAUNCHES 5

typedef struct {
  int32_t launch_count;
  outrider_device_launch launches[OUTRIDER_DEVICE_MAX_LAUNCHES];
  uint64_t call[64]; /* the one parameter of every kernel, by value: kernelParams = {plan.call} */
} outrider_device_plan;

/* Bytes of workspace for these sizes; 0 where they are illegal. */
OUTRIDER_API size_t outrider_device_workspace_size(const outrider_device_sizes* sizes);

/* outrider_draw, on the device: all pointers are device addresses, those in the slots too. Rows of logits
 * are aligned to their elements; where also to 16 bytes they are read faster. A slot that fails gets the
 * draft token -1, which must not be embedded, until the verification refuses it. Returns
 * OUTRIDER_BAD_ARGUMENT or OUTRIDER_SMALL_WORKSPACE, and then no plan. */
OUTRIDER_API int32_t outrider_device_plan_draw(const outrider_device_sizes* sizes,
                      const outrider_logits* logits, const outrider_slot* slots, int32_t step,
                      const double* uniforms, int64_t* drafts, outrider_row* rows,
                      outrider_verdict* verdicts, void* workspace, size_t workspace_size,
                      outrider_device_plan* plan);

/* outrider_verify, likewise. draft: NULL or its data NULL for a draft without a distribution. */
OUTRIDER_API int32_t outrider_device_plan_verify(const outrider_device_sizes* sizes,
                      const outrider_logits* target, const outrider_logits* draft,
                      const outrider_slot* slots, const double* uniforms, const int64_t* drafts,
                      const outrider_row* rows, outrider_verdict* verdicts, double* ratios,
                      void* workspace, size_t workspace_size, outrider_device_plan* plan);

/* --- the same on a GPU: between the calls of the models -----------------------------------------
 *
 * So that a round is one graph, and the next can be launched before the host has seen this one, the
 * text of a slot and its lengths live on the device. Three kernels of outrider_cuda.cu keep them, each
 * of one block (of any number of threads) whose one parameter is an outrider_loop by value:
 *
 *   outrider_begin    what the models and the plans of a round read, from the sequences
 *   outrider_feed     after the draw of `step`: its tokens to the next draft step and to the target
 *   outrider_commit   after the verification: tokens and lengths of the sequences
 */
typedef struct {
  int64_t* tokens;       /* the text, prompt included; room for `most` ids */
  int64_t* draft_tokens; /* the same with 0 for ids that the draft cannot look up; may be `tokens` */
  const int64_t* ends;   /* ids that end the text */
  int32_t end_count;
  int32_t length;        /* ids so far */
  int32_t most;          /* the length at which the text ends */
  int32_t draft_most;    /* the length at which the draft's context ends */
  int32_t unsuppressed;  /* the length from which outrider_slot.suppress no longer holds */
  int32_t ended;         /* not 0: takes part in no round */
} outrider_sequence;

/* All arrays are in device memory. A slot takes part in a round where its turn is not negative and its
 * sequence has not ended; the others are fed what they have been fed before, beyond their valid rows. */
typedef struct {
  outrider_sequence* sequences;  /* [B] */
  outrider_slot* slots;          /* [B]: begin writes gamma, position, context_length, suppress_rows */
  const int32_t* turns;          /* [B] draft tokens that are wanted; -1: sits out */
  const int64_t* drafts;         /* [B, width] */
  const outrider_verdict* verdicts; /* [B] */
  int64_t* draft_ids;            /* [B, 2] for the first draft step: the last two tokens */
  int64_t* draft_position;       /* [B] */
  int64_t* step_ids;             /* [B] for the others: the token drawn before */
  int64_t* step_position;        /* [B] */
  int64_t* target_ids;           /* [B, width + 1]: the last token, and the drafts */
  int64_t* target_position;      /* [B] */
  uint64_t* clock;               /* [3] nanoseconds: begin, the last draft's feed, commit */
  int32_t slot_count, width;
  int32_t step;                  /* of a feed */
  int32_t draft_vocab_size;      /* ids from here on the draft cannot look up */
} outrider_loop;

/* A generation as one launch: a round is the body of a conditional node (CUDA 12.4), and a fourth
 * kernel, outrider_again, ends it. It puts the round's results where the host reads them, and has the
 * body repeated while a slot takes part, the host keeps up, and nobody wants it to stop. */
typedef struct {
  uint64_t condition;            /* the node's cudaGraphConditionalHandle */
  const outrider_sequence* sequences; /* [B] */
  const int32_t* turns;          /* [B] */
  const uint64_t* results;       /* [size / 8] of a round */
  uint64_t* ring;                /* [entries, size / 8]; this and the rest in page-locked host memory */
  volatile uint32_t* written;    /* rounds whose results the host may read, of all there ever were */
  const volatile uint32_t* read; /* rounds that it has read */
  const volatile uint32_t* stop; /* not 0: no other round */
  int32_t slot_count, size, entries, reserved;
} outrider_ring;

/* The instruction set in use: "avx512vnni", "avx512", "avxvnni" or "avx2" of x86, "dotprod" or
 * "neon" of ARM, or "plain". outrider_use makes later calls use another one (for tests; the same
 * draws and verdicts to the bit) and returns 0 where it is not there. */
OUTRIDER_API const char* outrider_instruction_set(void);
OUTRIDER_API int32_t outrider_use(const char* instruction_set);

#ifdef __cplusplus
}
#endif
#endif
