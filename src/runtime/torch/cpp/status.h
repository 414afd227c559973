// Turns C++ exceptions into the Status codes of abi.h.
#pragma once
#include <c10/util/Exception.h>

#include <exception>
#include <new>

#include "abi.h"

namespace ckpt {

int32_t report(Status status, const char* message) noexcept;

// Runs `body`; whatever it throws becomes a status and a message without the C++ backtrace.
template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return CK_OK;
  } catch (const c10::OutOfMemoryError& error) {
    return report(CK_OUT_OF_MEMORY, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return report(CK_REFUSED, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return report(CK_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return report(CK_REFUSED, error.what());
  } catch (...) {
    return report(CK_REFUSED, "an exception that is no std::exception");
  }
}

}  // namespace ckpt
