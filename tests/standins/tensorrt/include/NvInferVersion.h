// The version whose interface this stand-in has.
#ifndef STANDIN_NV_INFER_VERSION_H
#define STANDIN_NV_INFER_VERSION_H
#define TRT_MAJOR_ENTERPRISE 11
#define NV_TENSORRT_MAJOR 11
#define NV_TENSORRT_VERSION 110100 // 11.1
#endif
