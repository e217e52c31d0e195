//! Compiles containerd's protocol. The compiler is a crate, so protoc need not be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["snapshots.proto"], ["proto"])?;
    let generator = tonic_prost_build::configure().build_transport(false);
    Ok(generator.compile_fds(files)?)
}
