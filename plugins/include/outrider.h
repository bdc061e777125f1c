/* liboutrider: exact speculative sampling. The C interface, for the CPU and for GPUs.
 *
 * A slot holds one sequence. In a round, `outrider_draw` draws the draft tokens, one step per call,
 * and `outrider_verify` verifies them; each call handles all slots. No function throws or keeps
 * state between calls (except `outrider_use`), and the caller provides the working memory. Calls
 * are thread-safe as long as they share neither a workspace nor outputs. A slot's results depend on
 * that slot alone, not on the rest of the batch, the number of threads or the instruction set.
 *
 * Shapes: B slots, gamma draft tokens per slot (at most `width`), V tokens in the target's
 * vocabulary. Ids outside [0, V) have probability 0.
 */
#ifndef OUTRIDER_H
#define OUTRIDER_H

#ifndef __CUDACC_RTC__
#include <stddef.h>
#include <stdint.h>
#else /* NVRTC comes without standard headers */
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

#define OUTRIDER_ABI_VERSION 14
#define OUTRIDER_MAX_WIDTH 64 /* maximum number of draft tokens per round */

enum {
  OUTRIDER_OK = 0,
  OUTRIDER_BAD_ARGUMENT = 1,
  OUTRIDER_BAD_PARAMETER = 2,
  OUTRIDER_SMALL_WORKSPACE = 3,
  OUTRIDER_NO_DRAFT_LOGITS = 4, /* a slot: the sigmoid rule needs the draft's logits */
  OUTRIDER_SLOT_FAILED = 5,     /* a call: at least one slot failed; its verdict has the reason */
  OUTRIDER_NAN = 6,             /* a slot: NaN in the logits */
  OUTRIDER_INFINITE = 7,        /* a slot: +inf in the logits */
  OUTRIDER_NO_TOKEN = 8         /* a slot: every logit is -inf */
};

enum { OUTRIDER_FLOAT32 = 0, OUTRIDER_FLOAT16 = 1, OUTRIDER_BFLOAT16 = 2 };

/* Verification rules. Greedy decoding is any exact rule at temperature 0. With the coupled rule,
 * the target's distribution and the seed determine the token at a position; the draft draws with
 * the same noise, and a draft token is accepted if it is that token. */
enum { OUTRIDER_TOKEN = 0, OUTRIDER_BLOCK = 1, OUTRIDER_SIGMOID = 2, OUTRIDER_COUPLED = 3 };

enum { OUTRIDER_TARGET = 0, OUTRIDER_DRAFT = 1 };

/* Logits [*, rows, vocab_size]. Strides are in bytes; the CPU library requires no alignment. */
typedef struct {
  const void* data; /* NULL: a draft without a distribution (n-gram lookup), read as point masses */
  int64_t slot_stride;
  int64_t row_stride;
  int32_t vocab_size;
  int32_t dtype;
} outrider_logits;

/* Sampling parameters and position of one slot. */
typedef struct {
  uint64_t seed;
  double top_p;              /* (0, 1]; 1 is off */
  double lenience;           /* (0, 1]; 1 is exact, lower values accept more draft tokens */
  double sigmoid_alpha;      /* < 0 */
  double sigmoid_beta;       /* > 0 */
  const int64_t* context;    /* [context_length] ids before the round, for the penalties */
  const int64_t* suppress;   /* [suppress_length] ids whose probability is set to 0 */
  const int64_t* bias_ids;   /* [bias_length] ids with a logit bias, ascending */
  const float* biases;       /* [bias_length] added to their logits before any penalty */
  int32_t context_length;
  int32_t output_start;      /* start of the output in context: from here on, ids are counted */
  int32_t suppress_length;
  int32_t bias_length;
  int32_t suppress_rows;     /* suppress applies to rows 0 .. suppress_rows - 1 of the round */
  float temperature;         /* 0: argmax, lowest index on ties */
  float min_p;               /* [0, 1]; 0 is off */
  float repetition_penalty;  /* > 0; 1 is off */
  float frequency_penalty;   /* subtracted for each occurrence of the id in the output; 0 is off */
  float presence_penalty;    /* subtracted once if the id occurs in the output; 0 is off */
  int32_t top_k;             /* 0 is off */
  int32_t rule;              /* all rules but token require lenience 1; sigmoid, temperature > 0 */
  int32_t gamma;             /* number of draft tokens, 0 .. width; -1: skip this slot */
  uint32_t position;         /* absolute index of the round's first token */
  int32_t index;             /* index of this slot in the logits */
  int32_t reserved;
} outrider_slot;

/* A row's distribution, up to its logits z: weight(x) = 2^((z_x - peak) * rate), or 0 if a filter
 * removed x; q(x) = weight(x) / total. `outrider_draw` fills one per draft row, so that
 * `outrider_verify` reads the logits of at most one draft row. */
typedef struct {
  double total;
  float peak;
  float rate;                /* log2(e) / temperature; 0: a point mass on `token` */
  float cut;                 /* logits below cut have weight 0, */
  int32_t tie_from;          /* as have logits equal to cut at indices below tie_from */
  float min_weight;          /* weights below it are set to 0 */
  int32_t token;             /* the token drawn */
  float weight;              /* its weight */
  int32_t status;            /* OUTRIDER_OK, or an error in the row; outrider_verify checks it */
} outrider_row;

/* The outcome of a round for one slot. */
typedef struct {
  int64_t token;    /* the token after the accepted ones: a correction or the bonus token */
  int32_t accepted; /* number of draft tokens accepted */
  int32_t examined; /* number of ratios written: min(1, p/q) at the positions the rule examined */
  int32_t status;   /* OUTRIDER_OK, or an error in a row; token is then -1 */
  int32_t model;    /* of the row with the error: OUTRIDER_TARGET or OUTRIDER_DRAFT */
  int32_t row;      /* its index in the round, from 0 */
  int32_t reserved;
} outrider_verdict;

/* A description of a status, in static memory. */
OUTRIDER_API const char* outrider_status_text(int32_t status);

/* OUTRIDER_ABI_VERSION of the library. */
OUTRIDER_API int32_t outrider_abi_version(void);

/* The workspace size in bytes for a call with these sizes; 0 if they are invalid. vocab_size: the
 * larger of the target's and the draft's. threads: as in the call, 1 to 64. */
OUTRIDER_API size_t outrider_workspace_size(int32_t vocab_size, int32_t width, int32_t threads);

/* Draw the draft token of step `step` for every slot with step < gamma.
 *
 * logits: row 0 of each slot is read. drafts [slots, width]: the tokens of earlier steps are read
 * (for the penalties), the token of this step is written. rows [slots, width]: the row of this step
 * is written. uniforms: [slots, width], or NULL to use Philox. verdicts: [slots], or NULL; status
 * and row report a slot that failed. threads: maximum number of threads.
 */
OUTRIDER_API int32_t outrider_draw(const outrider_logits* logits, const outrider_slot* slots,
                      int32_t slot_count, int32_t width, int32_t step, const double* uniforms,
                      int64_t* drafts, outrider_row* rows, outrider_verdict* verdicts,
                      void* workspace, size_t workspace_size, int32_t threads);

/* Verify a round: compare target rows 0 .. gamma with draft rows 0 .. gamma - 1, for every slot.
 *
 * draft: the logits that the draft tokens were drawn from, unchanged since. rows [slots, width]: as
 * written by outrider_draw, or NULL to compute them here. uniforms: [slots, width + 1], those of
 * the accept tests and then that of the final draw, or NULL to use Philox. ratios: [slots, width],
 * or NULL. threads: maximum number of threads.
 */
OUTRIDER_API int32_t outrider_verify(const outrider_logits* target, const outrider_logits* draft,
                        const outrider_slot* slots, int32_t slot_count, int32_t width,
                        const double* uniforms, const int64_t* drafts, const outrider_row* rows,
                        outrider_verdict* verdicts, double* ratios, void* workspace,
                        size_t workspace_size, int32_t threads);

/* Compute the unnormalised weights [vocab_size] of row 0 of one slot, with temperature, penalties
 * and filters applied; for tests and tools. The workspace is that of width OUTRIDER_MAX_WIDTH and
 * one thread. Returns the row's status. */
OUTRIDER_API int32_t outrider_warp(const outrider_logits* logits, const outrider_slot* slot, float* weights,
                      double* total, void* workspace, size_t workspace_size);

/* Philox 4x32-10, and the 53-bit uniform number in [0, 1) derived from it. */
OUTRIDER_API void outrider_philox4x32(uint64_t key, const uint32_t counter[4], uint32_t answer[4]);
OUTRIDER_API double outrider_uniform(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t lane);

/* Log-softmax (natural logarithm) of a row of logits [vocab_size], computed in double precision. */
OUTRIDER_API void outrider_log_softmax(const float* logits, int32_t vocab_size, double* logprobs);

/* The softmax probability of one id after the logits are divided by `temperature`. */
OUTRIDER_API double outrider_confidence(const float* logits, int32_t vocab_size, int64_t id,
                                        double temperature);

/* Quantise a block of a weight matrix's columns to 4 bits, with one scale per row.
 *
 * wanted [columns, rows]: the values to approximate; columns is at most 32. numbers [columns,
 * rows]: the original values, which may be the same array; level * scale is subtracted from them.
 * scales [rows]: for each row, the scale with the least error, representable in float16. levels: -8
 * .. 7; row n's start at levels + n * level_stride. inverse [columns, columns]: how the rounding
 * error of a column changes the wanted values of later ones, finite, upper triangular with a unit
 * diagonal; NULL: not at all. Returns OUTRIDER_BAD_PARAMETER for NaN, infinity and values beyond
 * the reach of any scale; the contents of the outputs are then undefined.
 */
OUTRIDER_API int32_t outrider_round4(const float* wanted, float* numbers, int64_t rows, int32_t columns,
                                     const float* inverse, int8_t* levels, int64_t level_stride,
                                     float* scales, int32_t threads);

/* --- sampling on a GPU: launch plans ------------------------------------------------------------
 *
 * liboutrider launches nothing itself. These functions run on the host, do not touch the GPU, and
 * return the kernels of outrider_cuda.cu to launch, in order, on one stream. Grids, blocks and
 * addresses depend on the arguments alone, so a plan can be captured in a graph and replayed;
 * slots, drafts, logits, uniforms and the ids that slots point to are read on the device when a
 * kernel runs.
 *
 * The workspace is device memory, 256-byte-aligned, zeroed once after it is allocated (the kernels
 * leave its counters at 0). It belongs to one outrider_device_sizes; draws and verifications with
 * those sizes may share it as long as they run one after another on a stream.
 *
 * The GPU kernels do not count ids: a slot with frequency_penalty, presence_penalty or biases gets
 * OUTRIDER_BAD_PARAMETER.
 */

/* The features that the slots of a plan may use. A slot that uses another one gets
 * OUTRIDER_BAD_PARAMETER, as a slot with an invalid parameter does. Fewer flags mean fewer launches
 * and less memory. */
enum {
  OUTRIDER_DEVICE_FILTERS = 1,   /* top_k, top_p, min_p */
  OUTRIDER_DEVICE_PENALTIES = 2, /* repetition_penalty, suppress */
  OUTRIDER_DEVICE_BLOCK = 4,     /* the block rule */
  OUTRIDER_DEVICE_SHAPES = 8,    /* verification with draft logits but rows == NULL */
  OUTRIDER_DEVICE_COUPLED = 16   /* the coupled rule */
};

typedef struct {
  int32_t slot_count;       /* 1 .. 65535 */
  int32_t width;            /* draft tokens per round, 0 .. OUTRIDER_MAX_WIDTH */
  int32_t vocab_size;       /* the target's; 0 if the plans only draw */
  int32_t draft_vocab_size; /* 0 if the draft has no logits */
  int32_t flags;            /* OUTRIDER_DEVICE_... */
  int32_t reserved;
} outrider_device_sizes;

typedef struct {
  const char* kernel; /* name in the cubin, in static memory */
  uint32_t grid[3];
  uint32_t block; /* number of threads, one-dimensional; no dynamic shared memory */
} outrider_device_launch;

#define OUTRIDER_DEVICE_MAX_LAUNCHES 6

typedef struct {
  int32_t launch_count;
  outrider_device_launch launches[OUTRIDER_DEVICE_MAX_LAUNCHES];
  uint64_t call[64]; /* every kernel's only parameter, by value: kernelParams = {plan.call} */
} outrider_device_plan;

/* The workspace size in bytes for these sizes; 0 if they are invalid. */
OUTRIDER_API size_t outrider_device_workspace_size(const outrider_device_sizes* sizes);

/* Plan outrider_draw on the device. All pointers are device addresses, including those in the
 * slots. Rows of logits must be aligned to their elements; rows aligned to 16 bytes are read
 * faster. A slot that fails gets the draft token -1, which must not be looked up in an embedding;
 * the verification reports the failure. On OUTRIDER_BAD_ARGUMENT and OUTRIDER_SMALL_WORKSPACE there
 * is no plan. */
OUTRIDER_API int32_t outrider_device_plan_draw(const outrider_device_sizes* sizes,
                      const outrider_logits* logits, const outrider_slot* slots, int32_t step,
                      const double* uniforms, int64_t* drafts, outrider_row* rows,
                      outrider_verdict* verdicts, void* workspace, size_t workspace_size,
                      outrider_device_plan* plan);

/* Plan outrider_verify on the device, with the same requirements. draft: NULL, or with data NULL,
 * for a draft without a distribution. */
OUTRIDER_API int32_t outrider_device_plan_verify(const outrider_device_sizes* sizes,
                      const outrider_logits* target, const outrider_logits* draft,
                      const outrider_slot* slots, const double* uniforms, const int64_t* drafts,
                      const outrider_row* rows, outrider_verdict* verdicts, double* ratios,
                      void* workspace, size_t workspace_size, outrider_device_plan* plan);

/* --- sampling on a GPU: between the calls of the models -----------------------------------------
 *
 * The tokens and lengths of the sequences are kept on the device, so that a round is one graph and
 * the next round can be launched before the host has seen this one. Three kernels of
 * outrider_cuda.cu update them. Each runs as one block (of any number of threads) and takes an
 * outrider_bookkeeping by value as its only parameter:
 *
 *   outrider_begin    writes, from the sequences, the inputs of the models and of a round's plans
 *   outrider_feed     after the draw of `step`: passes its tokens to the next step and the target
 *   outrider_commit   after the verification: updates the sequences' tokens and lengths
 */
typedef struct {
  int64_t* tokens;       /* prompt and output; room for `max_length` ids */
  int64_t* draft_tokens; /* the same, 0 for ids outside the draft's vocabulary; may be `tokens` */
  const int64_t* ends;   /* [end_count] ids that end the sequence */
  int32_t end_count;
  int32_t length;        /* number of ids so far */
  int32_t max_length;    /* the length at which the sequence ends */
  int32_t draft_max_length; /* the length at which the draft's context ends */
  int32_t unsuppressed;  /* the length from which outrider_slot.suppress no longer applies */
  int32_t ended;         /* not 0: takes part in no further round */
} outrider_sequence;

/* All arrays are in device memory. A slot takes part in a round if its turn is not negative and its
 * sequence has not ended. The models run for the other slots too, with the same tokens at the same
 * positions as before, so their valid rows do not change. */
typedef struct {
  outrider_sequence* sequences;  /* [B] */
  outrider_slot* slots;          /* [B]; writes gamma, position, context_length, suppress_rows */
  const int32_t* turns;          /* [B] maximum number of draft tokens; -1: skip this slot */
  const int64_t* drafts;         /* [B, width] */
  const outrider_verdict* verdicts; /* [B] */
  int64_t* draft_ids;            /* [B, 2] inputs of the first draft step: the last two tokens */
  int64_t* draft_position;       /* [B] */
  int64_t* step_ids;             /* [B] inputs of later draft steps: the token drawn last */
  int64_t* step_position;        /* [B] */
  int64_t* target_ids;           /* [B, width + 1] the last token and the draft tokens */
  int64_t* target_position;      /* [B] */
  uint64_t* clock;               /* [3] nanoseconds: at begin, the last feed and commit */
  int32_t slot_count, width;
  int32_t step;                  /* of outrider_feed */
  int32_t draft_vocab_size;      /* ids from here on are outside the draft's vocabulary */
} outrider_bookkeeping;

/* The instruction set in use: "avx512vnni", "avx512", "avxvnni" or "avx2" on x86, "dotprod" or
 * "neon" on ARM, or "plain". outrider_use selects another one for later calls (for tests: draws and
 * verdicts are bitwise the same); it returns 1, or 0 if that one is not available. */
OUTRIDER_API const char* outrider_instruction_set(void);
OUTRIDER_API int32_t outrider_use(const char* instruction_set);

#ifdef __cplusplus
}
#endif
#endif
