/* Generate with a bundle from C or C++: requests occupy slots and advance round by round.
 *
 * A session performs the same rounds as the Python runtime and returns bitwise the same results,
 * token ids and log-probabilities, at every temperature, gamma, kind of draft and number of slots.
 * It runs bundles for the CPU (backend onnxruntime) and, with a second library beside this one,
 * bundles for TensorRT (docs/embedding.md). Prompts and results are token ids; tokenization is left
 * to the caller. outrider.hpp wraps this interface for C++17.
 *
 *   outrider_open -> outrider_admit or outrider_begin
 *     ... -> outrider_round, outrider_take ... -> outrider_release
 *
 * A program compiled with another version of the headers has different structures: compare
 * outrider_abi_version() with OUTRIDER_ABI_VERSION first.
 *
 * Threads: a session may be used by one thread at a time; only `outrider_cancel` may be called by
 * any thread at any time. Sessions share no state. No function throws. No function keeps a pointer
 * argument after it returns, except the callback of a request.
 *
 * Errors: every function that can fail returns OUTRIDER_OK or one of OUTRIDER_FAILED_..., which are
 * also the exit statuses of the command line, and fills `failure` unless it is NULL.
 */
#ifndef OUTRIDER_SESSION_H
#define OUTRIDER_SESSION_H

#include "outrider.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Error statuses. */
enum {
  OUTRIDER_FAILED_OPTION = 2,   /* an option's value or a combination of options is invalid */
  OUTRIDER_FAILED_BUNDLE = 7,   /* a bundle is missing, damaged, or of another version */
  OUTRIDER_FAILED_BACKEND = 8,  /* ONNX Runtime, TensorRT or a GPU is missing or failed */
  OUTRIDER_FAILED_PROMPT = 9,   /* the prompt is empty, too long, or has ids that do not exist */
  OUTRIDER_FAILED_NUMERIC = 10, /* NaN or infinity in a model's logits */
  OUTRIDER_FAILED_MEMORY = 11,  /* not enough memory */
  OUTRIDER_FAILED_BUSY = 14     /* all slots are in use */
};

/* Why a call failed. Both texts are a line of UTF-8 without a final full stop, cut if too long. */
typedef struct {
  int32_t status;   /* OUTRIDER_FAILED_... */
  char cause[480];
  char remedy[256]; /* what to do about it */
} outrider_failure;

typedef struct outrider_session outrider_session;

/* How to open a bundle. Zero-initialise, then set at least abi_version and folder. */
typedef struct {
  int32_t abi_version;     /* OUTRIDER_ABI_VERSION, the version of the headers compiled with */
  int32_t plain_width;     /* minimum number of tokens in a call of the target, 1 or 2; 0: the least
                              whose results are bitwise equal to those of wider calls; CPU only */
  const char* folder;      /* the bundle, as written by `make engines` */
  const char* onnxruntime; /* path of ONNX Runtime's library, for bundles that use it; NULL or
                              empty: $OUTRIDER_ONNXRUNTIME, else the system's libonnxruntime.so */
  const int64_t* corpus;   /* [corpus_length] more token ids to search by n-gram lookup, after the
                              request's own tokens */
  int64_t corpus_length;
  int32_t slots;           /* maximum number of concurrent requests; 0: the bundle's */
  int32_t threads;         /* for each model on the CPU, and for sampling; 0: automatic */
  int32_t unverified;      /* not 0: do not verify the files' hashes */
  int32_t no_reuse;        /* not 0: compute every prompt in full, even if a slot's cache still
                              holds its beginning */
} outrider_config;

/* What an open session offers. */
typedef struct {
  int32_t vocab_size;   /* token ids are in [0, vocab_size) */
  int32_t max_len;      /* maximum length of prompt and output together */
  int32_t max_gamma;    /* maximum number of draft tokens per round */
  int32_t slots;        /* maximum number of concurrent requests */
  int32_t has_draft;    /* not 0: the bundle has a draft model */
  int32_t output_invariant; /* not 0: with the coupled rule or at temperature 0, the output is
                               bitwise the same for every gamma, draft, slot and set of
                               concurrent requests */
  int32_t end_count;
  int32_t reserved;
  const int64_t* ends;  /* [end_count] end-of-sequence ids; valid until outrider_close */
} outrider_facts;

/* Where draft tokens come from. */
enum {
  OUTRIDER_DRAFT_DEFAULT = 0, /* what the bundle was built with */
  OUTRIDER_DRAFT_MODEL = 1,   /* the draft model */
  OUTRIDER_DRAFT_NGRAM = 2,   /* n-gram lookup in the request's own tokens, then in the corpus */
  OUTRIDER_DRAFT_COPY = 3,    /* the same without the output: in the prompt, then in the corpus */
  OUTRIDER_DRAFT_CHAIN = 4,   /* the draft model, itself sped up by n-gram lookup */
  OUTRIDER_DRAFT_RANDOM = 5,  /* uniformly random tokens */
  OUTRIDER_DRAFT_NONE = 6     /* plain decoding */
};

enum { OUTRIDER_DEFAULT_GAMMA = -1 }; /* 4 with a draft model, 8 with the other drafts */

/* Called with each new token, in order, unless it is an id that ends the sequence. A result other
 * than 0 ends the sequence after the token. The callback must neither use the session nor throw. */
typedef int32_t (*outrider_stop)(void* data, int64_t token);

/* How to generate. Initialise with outrider_default_options. */
typedef struct {
  uint64_t seed;
  double temperature;        /* 0 (greedy), or 1e-6 to 1e6 */
  double top_p;              /* (0, 1]; 1 is off */
  double min_p;              /* [0, 1]; 0 is off */
  double repetition_penalty; /* 1e-3 to 1e3; 1 is off */
  double frequency_penalty;  /* -2 to 2; 0 is off */
  double presence_penalty;   /* -2 to 2; 0 is off */
  double lenience;           /* (0, 1]; 1 is exact, lower values accept more draft tokens */
  double sigmoid_alpha;      /* < 0 */
  double sigmoid_beta;       /* > 0 */
  double draft_temperature;  /* 1e-3 to 1e3; 0: the target's temperature */
  double draft_threshold;    /* [0, 1): stop drafting in a round after a token to which the draft
                                model gave a lower probability; 0 is off */
  const int64_t* bias_ids;   /* [bias_length] ids with a logit bias */
  const double* biases;      /* [bias_length] added to their logits, -100 to 100 */
  const int64_t* stops;      /* [stop_length] ids that end the sequence, besides the bundle's */
  outrider_stop stop;        /* NULL: no callback */
  void* stop_data;           /* passed to the callback */
  int32_t bias_length;
  int32_t stop_length;
  int32_t top_k;             /* 0 is off */
  int32_t rule;              /* OUTRIDER_TOKEN ... OUTRIDER_COUPLED */
  int32_t draft;             /* OUTRIDER_DRAFT_... */
  int32_t gamma;             /* draft tokens per round; 0: plain decoding; OUTRIDER_DEFAULT_GAMMA */
  int32_t max_new_tokens;
  int32_t min_new_tokens;
  int32_t ignore_eos;        /* not 0: do not stop at the bundle's end-of-sequence ids */
  int32_t logprobs;          /* number of alternatives to report; -1: no log-probabilities */
} outrider_options;

/* Where an output token comes from. */
enum {
  OUTRIDER_FIRST = 0,     /* the prefill */
  OUTRIDER_ACCEPTED = 1,  /* an accepted draft token */
  OUTRIDER_CORRECTED = 2, /* drawn in place of a rejected draft token */
  OUTRIDER_BONUS = 3,     /* drawn after all draft tokens were accepted */
  OUTRIDER_PLAIN = 4      /* a round without draft tokens */
};

/* An output token. */
typedef struct {
  int64_t id;
  double logprob;         /* under the target's unwarped distribution; NaN if not requested */
  const int64_t* ids;     /* [alternative_count] the most probable ids, best first; valid until the
                             next call with this session */
  const double* logprobs; /* [alternative_count] their log-probabilities */
  int32_t alternative_count;
  int32_t origin;         /* OUTRIDER_FIRST ... OUTRIDER_PLAIN */
} outrider_token;

/* Why a sequence ended. */
enum {
  OUTRIDER_RUNNING = 0,   /* it has not */
  OUTRIDER_EOS = 1,       /* an end-of-sequence id of the bundle */
  OUTRIDER_STOPPED = 2,   /* a stop id or the callback */
  OUTRIDER_LENGTH = 3,    /* max_new_tokens */
  OUTRIDER_CONTEXT = 4,   /* the bundle's max_len */
  OUTRIDER_CANCELLED = 5, /* outrider_cancel */
  OUTRIDER_BROKEN = 6     /* NaN or infinity in its logits, or text that could not be read;
                             outrider_take returns the details */
};

/* Statistics of a request. */
typedef struct {
  int64_t prompt_tokens;
  int64_t reused_tokens;  /* prompt tokens whose cache rows were reused */
  int64_t output_tokens;
  int64_t rounds;         /* without the prefill, which gives the first token */
  int64_t drafted;        /* draft tokens proposed */
  int64_t accepted;       /* draft tokens that became output */
  double prefill_seconds;
  double round_seconds;   /* total time of its rounds, including other requests in them, but not
                             the target's reading of prompts */
  double draft_seconds;   /* part of round_seconds spent in the draft model */
  double target_seconds;  /* part spent in the target; the rest is sampling and host code */
} outrider_stats;

/* Open a bundle. On failure, *session is NULL. */
OUTRIDER_API int32_t outrider_open(const outrider_config* config, outrider_session** session,
                                   outrider_failure* failure);

/* Close a session, even if requests are still running. NULL is allowed. */
OUTRIDER_API void outrider_close(outrider_session* session);

/* Describe a session. If it is NULL, all facts are zero. */
OUTRIDER_API void outrider_get_facts(const outrider_session* session, outrider_facts* facts);

/* Set every option to its default: greedy, the bundle's draft, 256 new tokens. */
OUTRIDER_API void outrider_default_options(outrider_options* options);

/* Take a slot, read the prompt [length] and draw the first token. `request` receives the request's
 * number, which is not that of the slot. Returns OUTRIDER_FAILED_BUSY if no slot is free. */
OUTRIDER_API int32_t outrider_admit(outrider_session* session, const int64_t* prompt,
                                    int64_t length, const outrider_options* options,
                                    uint64_t* request, outrider_failure* failure);

/* The same, but the prompt is read by the next rounds, in chunks, so that other requests advance
 * meanwhile and outrider_cancel need not wait for it. A failure to read it ends the request with
 * OUTRIDER_BROKEN. */
OUTRIDER_API int32_t outrider_begin(outrider_session* session, const int64_t* prompt,
                                    int64_t length, const outrider_options* options,
                                    uint64_t* request, outrider_failure* failure);

/* Read prompts that are being read, in turns: a chunk (256 tokens) of one, or several that are
 * together no longer. Then run one round for all requests that have their first token and have not
 * ended. A request gets at most its first token in a round in which its prompt is read, and none in
 * one in which the draft model lacks more than a chunk of its text: the draft then reads one chunk
 * of the oldest such text. NaN or infinity in the logits of one request, or text that a model cannot
 * read, ends only that request; the status reports failures of the whole round. */
OUTRIDER_API int32_t outrider_round(outrider_session* session, outrider_failure* failure);

/* Take the next output tokens: at most `capacity` into `tokens`, their number into `count`. finish:
 * why the sequence ended, if these are its last tokens, else OUTRIDER_RUNNING; NULL is allowed. For
 * a sequence that ended with OUTRIDER_BROKEN, the call that takes the last token, and every later
 * one, returns a failure, usually OUTRIDER_FAILED_NUMERIC; the tokens are valid nevertheless. */
OUTRIDER_API int32_t outrider_take(outrider_session* session, uint64_t request,
                                   outrider_token* tokens, int32_t capacity, int32_t* count,
                                   int32_t* finish, outrider_failure* failure);

/* End a request before the next round. May be called by any thread until `outrider_close`. A number
 * that no request has is ignored, and does not cancel a later request with that number. */
OUTRIDER_API void outrider_cancel(outrider_session* session, uint64_t request);

/* The statistics of a request so far. */
OUTRIDER_API int32_t outrider_get_stats(const outrider_session* session, uint64_t request,
                                        outrider_stats* stats, outrider_failure* failure);

/* Free a request's slot, even if the call fails. The slot keeps its cache rows, which a later
 * prompt with the same beginning reuses. */
OUTRIDER_API int32_t outrider_release(outrider_session* session, uint64_t request,
                                      outrider_failure* failure);

#ifdef __cplusplus
}
#endif
#endif
