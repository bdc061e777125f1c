/* A bundle opened from C or C++: requests in slots, advanced round by round.
 *
 * The same rounds as the Python runtime's, with the same bits: token ids and log-probabilities, at
 * every temperature, gamma, kind of draft and number of slots. It runs bundles for the CPU (backend
 * onnxruntime), and those of TensorRT with a library of its own beside this one (docs/embedding.md),
 * and speaks token ids. outrider.hpp wraps it for C++17.
 *
 *   outrider_open -> outrider_admit ... -> outrider_round, outrider_take ... -> outrider_release
 *
 * A program that was compiled with other headers reads other structures: compare
 * outrider_abi_version() with OUTRIDER_ABI_VERSION first.
 *
 * A session is used by one thread at a time; `outrider_cancel` alone may be called by any thread
 * meanwhile. Sessions share nothing. No function throws, and none keeps a pointer that it was given
 * beyond the call, but for the callback of a request.
 *
 * Every function that can fail returns a status, OUTRIDER_OK or a number that the command line ends
 * with too, and fills `failure` where that is not NULL.
 */
#ifndef OUTRIDER_SESSION_H
#define OUTRIDER_SESSION_H

#include "outrider.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { /* of a failure */
  OUTRIDER_FAILED_OPTION = 2,   /* an option's value, or a combination of options, is refused */
  OUTRIDER_FAILED_BUNDLE = 7,   /* a bundle is missing, damaged, or of another version */
  OUTRIDER_FAILED_BACKEND = 8,  /* ONNX Runtime, TensorRT or a GPU is missing, or failed */
  OUTRIDER_FAILED_PROMPT = 9,   /* the prompt is empty, too long, or has ids that do not exist */
  OUTRIDER_FAILED_NUMERIC = 10, /* NaN or infinity where probabilities were wanted */
  OUTRIDER_FAILED_MEMORY = 11,
  OUTRIDER_FAILED_BUSY = 14     /* all slots are in use */
};

typedef struct {
  int32_t status;
  char cause[480]; /* one line of UTF-8 each, without a full stop; cut where they are longer */
  char remedy[256];
} outrider_failure;

typedef struct outrider_session outrider_session;

/* How to open a bundle. All else zero is a good beginning. */
typedef struct {
  int32_t abi_version;     /* OUTRIDER_ABI_VERSION: which headers the program was compiled with */
  int32_t plain_width;     /* tokens of the target's narrowest calls, 1 or 2; 0: as many as it takes
                              to have the bits of wider ones; of the CPU alone */
  const char* folder;      /* what `make engines` wrote */
  const char* onnxruntime; /* the library's path, of bundles that it runs; NULL or empty:
                              $OUTRIDER_ONNXRUNTIME, or where the system looks for libonnxruntime.so */
  const int64_t* corpus;   /* [corpus_length] a text in which ngram looks after the text itself */
  int64_t corpus_length;
  int32_t slots;           /* requests at a time; 0: the bundle's number */
  int32_t threads;         /* of each model on the CPU, and of the sampling; 0: automatic */
  int32_t unverified;      /* not 0: the files' hashes are not looked at */
  int32_t no_reuse;        /* not 0: a prompt is computed whole, whatever rows a slot still holds */
} outrider_config;

typedef struct {
  int32_t vocab_size;   /* ids are below it */
  int32_t max_len;      /* longest prompt and output, together */
  int32_t max_gamma;
  int32_t slots;
  int32_t has_draft;    /* a draft model */
  int32_t one_text;     /* not 0: a text is the same to the bit for every gamma and draft (by the
                           coupled rule, or at temperature 0), slot and neighbour */
  int32_t end_count;
  int32_t reserved;
  const int64_t* ends;  /* [end_count] ids that end a text; as long as the session lives */
} outrider_facts;

enum { /* who proposes */
  OUTRIDER_DRAFT_DEFAULT = 0, /* what the bundle was built with */
  OUTRIDER_DRAFT_MODEL = 1,
  OUTRIDER_DRAFT_NGRAM = 2,   /* what followed the same tokens before, in text or corpus */
  OUTRIDER_DRAFT_COPY = 3,    /* in the prompt alone */
  OUTRIDER_DRAFT_CHAIN = 4,   /* the draft model, with ngram as its own draft */
  OUTRIDER_DRAFT_RANDOM = 5,  /* any token */
  OUTRIDER_DRAFT_NONE = 6
};

enum { OUTRIDER_USUAL_GAMMA = -1 }; /* 4 of a model, 8 of the others */

/* Called with each new token that does not end the text by itself, in order; not 0 ends it behind the
 * token. It must neither use the session nor throw. */
typedef int32_t (*outrider_stop)(void* data, int64_t token);

/* How to generate. Begin with outrider_default_options. */
typedef struct {
  uint64_t seed;
  double temperature;        /* 0, or 1e-6 to 1e6 */
  double top_p;
  double min_p;
  double repetition_penalty;
  double frequency_penalty;
  double presence_penalty;
  double lenience;
  double sigmoid_alpha;
  double sigmoid_beta;
  double draft_temperature;  /* 0: the target's */
  double draft_threshold;    /* no more drafts in a round after one that the draft gave less to */
  const int64_t* bias_ids;   /* [bias_length] what is added to the logits of some ids */
  const double* biases;
  const int64_t* stops;      /* [stop_length] ids that end the text, beside the bundle's own */
  outrider_stop stop;        /* NULL: none */
  void* stop_data;
  int32_t bias_length;
  int32_t stop_length;
  int32_t top_k;
  int32_t rule;              /* OUTRIDER_TOKEN ... OUTRIDER_COUPLED */
  int32_t draft;             /* OUTRIDER_DRAFT_... */
  int32_t gamma;             /* draft tokens a round, 0 for plain decoding */
  int32_t max_new_tokens;
  int32_t min_new_tokens;
  int32_t ignore_eos;        /* not 0: the bundle's own ends end nothing */
  int32_t logprobs;          /* how many alternatives to report; -1: no log-probabilities */
} outrider_options;

enum { /* where a token comes from */
  OUTRIDER_FIRST = 0,     /* the prompt's own call */
  OUTRIDER_ACCEPTED = 1,  /* a draft token that stands */
  OUTRIDER_CORRECTED = 2, /* in place of one that does not */
  OUTRIDER_BONUS = 3,     /* after drafts that all stand */
  OUTRIDER_PLAIN = 4      /* a round without drafts */
};

typedef struct {
  int64_t id;
  double logprob;         /* of the target's own distribution, before any warping; NaN if not asked */
  const int64_t* ids;     /* [alternative_count] the most probable, best first; until the next call */
  const double* logprobs; /* theirs */
  int32_t alternative_count;
  int32_t origin;
} outrider_token;

enum { /* why a text ended */
  OUTRIDER_RUNNING = 0,
  OUTRIDER_EOS = 1,
  OUTRIDER_STOPPED = 2,  /* by a stop id or the callback */
  OUTRIDER_LENGTH = 3,   /* max_new_tokens */
  OUTRIDER_CONTEXT = 4,  /* the bundle's max_len */
  OUTRIDER_CANCELLED = 5,
  OUTRIDER_BROKEN = 6    /* its logits are no numbers: `outrider_take` says which */
};

typedef struct {
  int64_t prompt_tokens;
  int64_t reused_tokens;  /* of the prompt: their rows were there already */
  int64_t output_tokens;
  int64_t rounds;         /* the first token is none */
  int64_t drafted;
  int64_t accepted;       /* drafts that became text */
  double prefill_seconds;
  double round_seconds;   /* of all rounds it took part in, those of others beside it included */
  double draft_seconds;   /* of them in the draft model, */
  double target_seconds;  /* and in the target; the rest is sampling and the host's */
} outrider_stats;

OUTRIDER_API int32_t outrider_open(const outrider_config* config, outrider_session** session,
                                   outrider_failure* failure);

/* Also with requests under way. NULL is allowed. */
OUTRIDER_API void outrider_close(outrider_session* session);

/* All zero of a session that is NULL. */
OUTRIDER_API void outrider_get_facts(const outrider_session* session, outrider_facts* facts);

OUTRIDER_API void outrider_default_options(outrider_options* options);

/* Take a slot, read the prompt [length], draw the first token. `request` is a number of its own, not
 * the slot's. BUSY where no slot is free. */
OUTRIDER_API int32_t outrider_admit(outrider_session* session, const int64_t* prompt,
                                    int64_t length, const outrider_options* options,
                                    uint64_t* request, outrider_failure* failure);

/* One round for all requests whose text has not ended; nothing where there is none. One request's
 * broken logits end that one; the status is of what ends the round for all. */
OUTRIDER_API int32_t outrider_round(outrider_session* session, outrider_failure* failure);

/* The next tokens that were not taken yet: at most `capacity` into `tokens`, how many into `count`.
 * finish: why the text ended, where these are its last; OUTRIDER_RUNNING before. Returns NUMERIC with
 * OUTRIDER_BROKEN, in every call; tokens that came before are there all the same. */
OUTRIDER_API int32_t outrider_take(outrider_session* session, uint64_t request,
                                   outrider_token* tokens, int32_t capacity, int32_t* count,
                                   int32_t* finish, outrider_failure* failure);

/* End a request before the next round. By any thread, at any time before `outrider_close`; a number
 * that is no request's is allowed, and ends nothing, also not what gets that number later. */
OUTRIDER_API void outrider_cancel(outrider_session* session, uint64_t request);

OUTRIDER_API int32_t outrider_get_stats(const outrider_session* session, uint64_t request,
                                        outrider_stats* stats, outrider_failure* failure);

/* The slot is free again, also where this fails; its rows stay, for a text that begins like this
 * one. */
OUTRIDER_API int32_t outrider_release(outrider_session* session, uint64_t request,
                                      outrider_failure* failure);

#ifdef __cplusplus
}
#endif
#endif
