-- Stage-in for the Flux job shell: copy to /etc/flux/shell/lua.d/zarrfs.lua, with stage and unstage in /etc/zarrfs/flux.
-- Or for oneself: flux run -o userrc=/path/to/zarrfs.lua ...
--
-- A job asks with ZARRFS_STAGE in its environment: lines of NAME SOURCE [OPTIONS], or comments ("#"). Before its tasks
-- start, each SOURCE is mounted at $ZARRFS_STAGED/NAME on each of its nodes, by the job's user; after they have ended it
-- is unmounted.

local here = shell.getenv ("ZARRFS_FLUX_DIR") or "/etc/zarrfs/flux"
local staged -- where it is, once it is

local function quoted (text)
    return "'" .. text:gsub ("'", "'\\''") .. "'"
end

local function job () -- its number, in whatever form; the last part of its directory has it where the shell is too old
    return shell.getenv ("FLUX_JOB_ID") or (shell.getenv ("FLUX_JOB_TMPDIR") or ""):match ("[^/]+$") or ""
end

-- Runs a script as the job's user; returns whether it succeeded, and what it writes, without the last newline: of one
-- that has failed never nothing.
local function run (script, ...)
    local command = "exec 2>&1; export ZARRFS_FLUX_SHELL=$PPID; " .. quoted (here .. "/" .. script)
    for _, argument in ipairs { ... } do
        command = command .. " " .. quoted (argument)
    end
    local pipe = io.popen (command .. "; echo \"status $?\"")
    local said = pipe:read ("*a")
    pipe:close ()
    local status = said:match ("status (%d+)\n$")
    said = said:gsub ("\n?status %d+\n$", "")
    if status ~= "0" and not said:match ("%S") then
        local how = status and "ended with status " .. status .. ", without a word" or "interrupted by a signal"
        said = script .. ": " .. how
    end
    return status == "0", said
end

plugin.register {
    name = "zarrfs",
    handlers = {
        {
            topic = "shell.init",
            fn = function ()
                local wanted = shell.getenv ("ZARRFS_STAGE")
                if not wanted or wanted == "" then
                    return true
                end
                local good, said = run ("stage", job (), wanted)
                if not good then
                    shell.die ("zarrfs: " .. said)
                    return false
                end
                staged = said
                shell.setenv ("ZARRFS_STAGED", staged)
                return true
            end,
        },
        {
            topic = "task.init", -- tasks may have taken their environment before shell.init
            fn = function ()
                if staged then
                    task.setenv ("ZARRFS_STAGED", staged)
                end
                return true
            end,
        },
        {
            topic = "shell.exit",
            fn = function ()
                if staged then
                    local good, said = run ("unstage", job ())
                    if not good then -- the epilog does it, with --lazy
                        shell.log_error ("zarrfs: " .. said)
                    end
                end
                return true
            end,
        },
    },
}
