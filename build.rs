fn main() {
    napi_build::setup();
    // The addon's thread lives as long as the process. When the last environment that loaded the addon ends (a worker
    // thread), Node unloads it; without this the thread would go on in unmapped code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
